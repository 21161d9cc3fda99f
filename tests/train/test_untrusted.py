"""A run folder from a stranger: what is in it is data, and no link in it is followed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from samo.checkpoint.manifest import NAME, encode_manifest
from samo.errors import CheckpointError, RunError
from samo.train import run_state
from samo.train.events import read_events
from samo.train.trainer import resume
from tests.train.helpers import recorded

VALID = torch.get_rng_state()


@pytest.mark.parametrize(
    "value",
    [VALID[:-1], VALID.float(), torch.zeros_like(VALID), "text", None],
    ids=["short", "float", "zeros", "text", "missing"],
)
def test_an_impossible_random_state_is_refused(
    run: Path, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **kwargs: Any) -> dict[str, Any]:
        extra = real(*args, **kwargs)
        del extra["random_cpu"]
        return extra if value is None else {**extra, "random_cpu": value}

    real = run_state.load
    monkeypatch.setattr(run_state, "load", load)
    message = r"is damaged: its random state or masks are not valid \(.*\); use another checkpoint"
    with pytest.raises(CheckpointError, match=message):
        resume(run)


def test_sizes_are_compared_with_the_files_before_a_model_takes_memory(run: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; import samo\n"
        "from samo.train.trainer import resume\n"
        "from samo.integrations.model_folders import open_model\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)\n"
        "for path in sys.argv[1:]:\n"
        "    for act in (open_model, resume):\n"
        "        try: act(Path(path))\n"
        "        except samo.SamoError as error: print(error)"
    )
    forged = []
    for size, value in (("width", 8192), ("context", 10**12), ("num_layers", 10**9)):
        forged.append(shutil.copytree(run, run.with_name(size)))
        record = json.loads((forged[-1] / "run.json").read_text())
        record["config"]["model"][size] = value
        (forged[-1] / "run.json").write_text(json.dumps(record))
        manifest = forged[-1] / "checkpoints" / "last" / NAME
        content = json.loads(manifest.read_text())
        content["extra"]["model"][size] = value
        manifest.write_bytes(encode_manifest(content))
    done = subprocess.run([sys.executable, "-c", code, *forged], capture_output=True, text=True)
    assert done.stderr == ""
    said = done.stdout.splitlines()
    for i, size in enumerate(("width", "context", "num_layers")):
        assert f"{size}/checkpoints/last' does not fit: '" in said[2 * i]
    assert "does not fit: 'blocks.0.attention.out.bias' has shape (32,)" in said[1]
    assert "--context must be 1 or more and less than 2,147,483,648" in said[3]
    assert "does not fit: 'blocks." in said[5]


def test_a_draft_that_is_a_link_is_not_written_through(run: Path, tmp_path: Path) -> None:
    (run / ".draft").symlink_to(tmp_path)
    with pytest.raises(RunError, match=r"\.draft' is a link, a pipe or a device"):
        resume(run)
    (run / ".draft").unlink()


def test_of_large_metrics_the_end_is_read(run: Path) -> None:
    whole, size = read_events(run / "metrics.jsonl")[0], (run / "metrics.jsonl").stat().st_size
    for last_bytes in (1, 200, 1000, size - 1, size):
        found, broken = read_events(run / "metrics.jsonl", last_bytes=last_bytes)
        assert broken == 0
        assert found == whole[len(whole) - len(found) :]
    assert found == whole
    os.truncate(run / "metrics.jsonl", 2**40)
    assert read_events(run / "metrics.jsonl") == ([], 0)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "checkpoints"])
def test_a_run_does_not_read_or_write_through_links(run: Path, name: str, tmp_path: Path) -> None:
    victim = (run / name).rename(tmp_path / "victim")
    (run / name).symlink_to(victim)
    before = sorted((p, p.is_file() and p.read_bytes()) for p in [victim, *victim.rglob("*")])
    with pytest.raises(RunError, match=f"'.*{name}' is a link, a pipe or a device, and a run us"):
        resume(run, config=recorded(run, steps=9) if name != "run.json" else None)
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(RunError, match=r"is a link, a pipe or a device|has no run.json"):
        resume(run)
    after = sorted((p, p.is_file() and p.read_bytes()) for p in [victim, *victim.rglob("*")])
    assert after == before
    (tmp_path / "link").symlink_to(run)  # a link to the folder itself is the user's own
    (run / name).unlink()
    victim.rename(run / name)
    assert resume(tmp_path / "link").step == 8
