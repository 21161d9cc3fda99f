"""What a folder holds, against a count by hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import samo
from samo.cli.main import main
from samo.integrations.export import export
from samo.integrations.folder_files import edit_config
from samo.integrations.inspection import inspect_folder
from tests.integrations.cases import IDS, causal_lm, exported, pruned

SPARSITY = 0.8


def write(folder: Path, family: str = "Llama", *, has_masks: bool = True) -> tuple[Any, samo.Masks]:
    model, masks = pruned(family, SPARSITY)
    model.save_pretrained(folder)
    if has_masks:
        masks.save(folder / "masks.safetensors")
    return model, masks


def test_kept_weights_are_those_of_the_masks_and_else_the_nonzero_ones(tmp_path: Path) -> None:
    model, masks = write(tmp_path)
    found = inspect_folder(tmp_path)
    assert (found.kind, found.model_type, found.dtype) == ("dense", "llama", "float32")
    assert found.masks == "masks.safetensors"
    assert {tensor.name: tensor.kept for tensor in found.pruned} == {
        name: mask.kept for name, mask in masks.items()
    }
    assert {t.name: t.shape for t in found.tensors} == {
        name: tuple(param.shape) for name, param in model.named_parameters()
    }
    files = (tmp_path / "model.safetensors", tmp_path / "masks.safetensors")
    assert found.num_bytes == sum(file.stat().st_size for file in files)
    files[1].unlink()
    again = inspect_folder(tmp_path)
    assert again.masks == "zeros"
    counts = [sum(t.kept or 0 for t in facts.pruned) for facts in (found, again)]
    assert counts[0] - counts[1] == 1  # the kept weight that is exactly 0


@pytest.mark.parametrize("family", ["GPT2", "Gemma", "Mixtral"])
def test_other_families_are_counted(tmp_path: Path, family: str) -> None:
    model, masks = write(tmp_path, family, has_masks=False)
    found = inspect_folder(tmp_path)
    assert sum(t.numel for t in found.tensors) == sum(p.numel() for p in model.parameters())
    assert sum(t.kept or 0 for t in found.pruned) == masks.kept - 1
    assert sum(t.numel for t in found.pruned) == masks.numel


def test_the_bytes_to_run_and_to_train_are_those_of_the_tensors(tmp_path: Path) -> None:
    model, masks = write(tmp_path)
    found = inspect_folder(tmp_path)
    assert found.run_bytes()["dense"] == sum(4 * param.numel() for param in model.parameters())
    assert found.train_bytes()["dense"] == sum(20 * param.numel() for param in model.parameters())
    dtype, twin = torch.bfloat16, pruned("Llama", SPARSITY)[0]
    samo.compress_(twin.requires_grad_(False), masks, weights="streamed")
    assert found.run_bytes()["streamed"] == samo.ledger(twin).measured_bytes
    samo.compress_(model, masks, weights="streamed", dtype=dtype, grad_dtype=dtype)
    opt = samo.AdamW(model.parameters())
    model(IDS, labels=IDS).loss.backward()
    opt.step()
    assert found.train_bytes()["streamed, exact"] == samo.ledger(model, opt).measured_bytes


@pytest.mark.parametrize(
    ("format", "kind"), [("bitmask", "sparse-bitmask"), ("compressed", "compressed")]
)
def test_a_folder_with_bitmaps_is_counted_by_them(tmp_path: Path, format: Any, kind: str) -> None:
    model, masks = pruned("Llama", SPARSITY)
    folder = export(model, tmp_path / "m", format=format, masks=masks)
    found = inspect_folder(folder)
    assert (found.kind, found.masks) == (kind, "bitmaps")
    kept = {name: mask.kept for name, mask in masks.items()}
    if format == "bitmask":
        kept[next(iter(kept))] -= 1  # the kept weight that is exactly 0
    assert {t.name: t.kept for t in found.pruned} == kept
    assert {t.name: t.shape for t in found.pruned} == {n: m.shape for n, m in masks.items()}
    assert sum(t.numel for t in found.tensors) == sum(p.numel() for p in model.parameters())
    state = load_file(folder / "model.safetensors")
    assert sum(t.num_bytes for t in found.tensors) == sum(t.nbytes for t in state.values())


def test_a_compressed_folder_that_does_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, "compressed")
    state = load_file(folder / "model.safetensors")
    state |= {"x": torch.ones(3), "x_bitmap": torch.ones(40).byte()}
    save_file(state, folder / "model.safetensors")
    with pytest.raises(samo.CheckpointError, match="is damaged: its model has no weight 'x'"):
        inspect_folder(folder)
    edit_config(folder, num_hidden_layers=10**9)
    with pytest.raises(samo.CheckpointError, match="has 1,000,000,000 layers, and its files"):
        inspect_folder(folder)


def test_masks_of_other_names_are_passed_over_for_zeros(tmp_path: Path) -> None:
    _, masks = write(tmp_path)
    samo.Masks({f"other.{name}": mask for name, mask in masks.items()}).save(
        tmp_path / "masks.safetensors"
    )
    assert inspect_folder(tmp_path).masks == "zeros"


# The command


def test_json_has_the_numbers_of_a_count_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = causal_lm("Llama")
    for layer in model.model.layers:  # 16 of 32 rows
        nn.init.zeros_(layer.self_attn.q_proj.weight[:16])
    model.save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # 2 x (32 x 32 x 2 + 32 x 16 x 2 + 32 x 64 x 3 + 2 x 32) + 2 x 64 x 32 + 32
    assert found["parameters"] == 22_688
    assert (found["prunable"], found["kept"]) == (2048, 1024)
    assert found["masks"] == "zeros"
    (own,) = [t for t in found["tensors"] if t["name"] == "model.layers.0.self_attn.q_proj.weight"]
    assert own == {
        "name": "model.layers.0.self_attn.q_proj.weight", "shape": [32, 32], "dtype": "float32",
        "kept": 512, "num_bytes": 4096, "numel": 1024, "sparsity": 0.5,
    }  # fmt: skip
    assert found["on_disk"] == (tmp_path / "model.safetensors").stat().st_size


def test_the_page_has_kinds_of_weights_and_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    _, masks = write(tmp_path)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"80 % of {masks.numel:,} in 14 tensors, by masks.safetensors" in shown
    assert "model.layers.*.mlp.up_proj " in shown
    assert re.search(r"model\.layers\.(1|0-1, each) ", shown)


def test_an_unpruned_folder_says_how_to_prune_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    causal_lm("GPT2").save_pretrained("gpt2")
    capsys.readouterr()
    assert main(["inspect", "gpt2"]) == 0
    assert "nothing; choose what to keep with: samo prune gpt2" in capsys.readouterr().out
    assert main(["inspect", "gpt2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["masks"] == ""


def test_names_in_a_folder_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "layers.0.\x1b[2Jweight"
    save_file({name: torch.eye(8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "\\u001b[2Jx", "dtype": "evil"}')
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "?[2Jweight" in shown
    assert "?[2Jx, float32" in shown
    assert "\x1b" not in shown


def test_a_link_in_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "m")
    (tmp_path / "m" / "more.safetensors").symlink_to("/dev/zero")
    assert main(["inspect", str(tmp_path / "m")]) == 1
    assert "is a link, a pipe or a device" in capsys.readouterr().err
