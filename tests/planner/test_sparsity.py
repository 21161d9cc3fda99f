"""How far a folder is pruned is read from its files, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import samo
from samo.errors import ConfigError
from samo.planner.public_models import PUBLIC
from tests.integrations.tiny_lms import tiny_lm


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for style in ("dense", "compressed", "bitmask"):
        model = tiny_lm(hidden_size=64, intermediate_size=128)
        masks = samo.prune(model, 0.6, rules={"*mlp*": 0.7})
        masks.apply_(model)
        folders[style] = tmp_path_factory.mktemp("folders") / style
        samo.export(model, folders[style], format=style, masks=masks)  # type: ignore[arg-type]
    return folders


@pytest.mark.parametrize("style", ["dense", "compressed", "bitmask"])
def test_the_sparsity_is_that_of_the_folder(style: str, pruned: dict[str, Path]) -> None:
    has_masks = (pruned[style] / "masks.safetensors").exists()
    assert has_masks == (style != "compressed")
    for without_masks in {False, style == "bitmask"}:
        if without_masks:
            (pruned[style] / "masks.safetensors").unlink()
            has_masks = False
        found = samo.plan(pruned[style], gpu="rtx4090")
        of = found.job.network.sparsity
        assert of["attention"] == pytest.approx(0.6, abs=1e-3)
        assert of["mlp"] == pytest.approx(0.7, abs=1e-3)
        assert (of["head"], of["embedding"]) == (0, 0)
        place = "masks.safetensors" if has_masks else "the bitmaps of the folder"
        assert f"attention 60 %, mlp 70 % (read from {place})" in " ".join(str(found).split())
        assert found.command.startswith(f"samo finetune {pruned[style]} ")
        assert "--sparsity" not in found.command
        assert "--rules" not in found.command


def test_what_is_given_wins_and_what_is_assumed_says_so(
    pruned: dict[str, Path], tmp_path: Path
) -> None:
    given = samo.plan(pruned["dense"], sparsity=0.8, gpu="rtx4090")
    assert given.job.network.sparsity["mlp"] == 0.8
    assert "--sparsity 0.8" in given.command
    assert "assumed; set" not in str(given)
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC["llama-3.2-1b"]))
    targets = {tmp_path: 70, tmp_path / "config.json": 70, "gpt3-125m": 90}
    for target, percent in targets.items():
        found = samo.plan(target, gpu="rtx4090")
        assert found.job.network.sparsity["mlp"] == percent / 100
        assert f"mlp {percent} % (assumed; set --sparsity)" in " ".join(str(found).split())
        assert f"--sparsity 0.{percent // 10}" in found.command


def test_counting_loads_no_torch(pruned: dict[str, Path]) -> None:
    code = (
        "import sys; from samo.cli.main import main; "
        f"code = main(['plan', {str(pruned['dense'])!r}, '--gpu', 'h200', '--json']); "
        "assert not {'torch', 'matplotlib'} & {*sys.modules}; "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["sparsity_from"] == "masks.safetensors"


def test_damaged_masks_are_named(tmp_path: Path, pruned: dict[str, Path]) -> None:
    (tmp_path / "config.json").write_bytes((pruned["dense"] / "config.json").read_bytes())
    good = (pruned["dense"] / "masks.safetensors").read_bytes()
    masks = tmp_path / "masks.safetensors"

    length = (2).to_bytes(8, "little")
    for content in (b"", b"\xff" * 64, good[:-64], length + b"[]", length + b"{}"):
        masks.write_bytes(content)
        with pytest.raises(ConfigError, match=r"masks.safetensors' cannot be read: .*; set --spar"):
            samo.plan(tmp_path, gpu="rtx4090")
        assert samo.plan(tmp_path, sparsity=0.5, gpu="rtx4090").best is not None
    masks.unlink()
    masks.symlink_to(pruned["dense"] / "masks.safetensors")
    with pytest.raises(ConfigError, match="it is a link"):
        samo.plan(tmp_path, gpu="rtx4090")


def test_a_folder_of_the_cache_of_the_hub_is_read(tmp_path: Path, pruned: dict[str, Path]) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name in ("config.json", "masks.safetensors"):
        (blobs / name).write_bytes((pruned["dense"] / name).read_bytes())
        (snapshot / name).symlink_to(blobs / name)
    assert samo.plan(snapshot, gpu="rtx4090").pruned_by == "masks.safetensors"
    (snapshot / "masks.safetensors").unlink()
    (snapshot / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert samo.plan(snapshot, gpu="rtx4090").pruned_by == "assumed"


def test_masks_of_another_model_are_refused(tmp_path: Path, pruned: dict[str, Path]) -> None:
    config = json.loads((pruned["dense"] / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    masks = (pruned["dense"] / "masks.safetensors").read_bytes()
    (tmp_path / "masks.safetensors").write_bytes(masks)
    with pytest.raises(ConfigError, match=r"the masks of '.*' are not of its model: sparsity of"):
        samo.plan(tmp_path, gpu="rtx4090")
