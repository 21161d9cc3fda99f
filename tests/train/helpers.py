"""Small runs, and what they leave: shared by the tests of training."""

import json
import random
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import samo
from samo.checkpoint import read_manifest
from samo.checkpoint.tensors import SavedTensors
from samo.cli.main import main
from samo.train import events
from samo.train.config import TrainConfig, with_values
from samo.train.events import Event
from samo.train.learner import Learner
from samo.train.rank_group import RankGroup
from samo.train.resolve import resolve
from samo.train.run_dir import RunDir
from samo.train.trainer import train

WORDS: Final = "the quick brown fox jumps over a lazy dog while it rains"
CLOCKED: Final = {"tokens_per_s", "step_ms", "memory_bytes", "elapsed_s"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps, pruned after 3."""
    home = tmp_path_factory.mktemp("finished")
    return train(small(write_text(home)), home / "run").folder


@pytest.fixture
def run(tmp_path: Path, finished: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def type_in(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs what is typed after ``samo``, and returns what that prints."""

    def run_line(line: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert main(shlex.split(line)) == code
        return capsys.readouterr()

    return run_line


def write_text(folder: Path) -> Path:
    draw = random.Random(0)
    path = folder / "notes.txt"
    path.write_text("\n".join(" ".join(draw.choices(WORDS.split(), k=8)) for _ in range(300)))
    return path


SHORT: Final[dict[str, Any]] = {
    **{"num_layers": 1, "width": 32, "num_heads": 2, "context": 32, "batch_size": 2},
    **{"steps": 8, "dense_steps": 3, "eval_every": 4, "eval_batches": 2, "save_every": 3},
    **{"log_every": 1, "sample_tokens": 5},
}


def small(text: Path, **values: Any) -> TrainConfig:
    """Return settings of a short run; ``values`` are those of any section."""
    if values.get("mode") == "dense":
        values = {"dense_steps": 0, **values}
    return with_values(TrainConfig(), train=(text,), **{**SHORT, **values})


METHODS: Final[dict[str, dict[str, Any]]] = {
    "dense": dict(dense_steps=0),
    "magnitude": dict(dense_steps=3),
    "settled": dict(method="early-bird", queue=3, mask_every=1, threshold=0.3, dense_steps=7),
    "limit": dict(method="early-bird", queue=2, mask_every=2, threshold=0.0, dense_steps=5),
    "gradual": dict(method="gradual", dense_steps=2, mask_every=2, mask_stop=7),
    "set": dict(method="set", dense_steps=0, mask_every=2, mask_stop=7),
    "rigl": dict(method="rigl", dense_steps=2, mask_every=2, mask_stop=8),
}


def method_config(text: Path, name: str, **values: Any) -> TrainConfig:
    return small(text, **{"lr": 1e-3, **METHODS[name], **values})


def last_masks(run: Path) -> samo.Masks:
    return samo.load_masks(run / "checkpoints" / "last")


def read_progress(run: Path, checkpoint: str = "last") -> dict[str, Any]:
    progress: dict[str, Any] = read_manifest(run / "checkpoints" / checkpoint).extra["progress"]
    return progress


def recorded(run: Path, **values: Any) -> TrainConfig:
    """Return the settings that a run has recorded, with others in their place."""
    config = RunDir(run).config()
    assert isinstance(config, TrainConfig)
    return with_values(config, **values)


def new_learner(
    model: torch.nn.Module, *, ranks: RankGroup | None = None, **values: Any
) -> Learner:
    config = resolve(small(Path("notes.txt")))
    usual = {"lr": 1e-3, "warmup_steps": 0, "density_power": 0.0, "dtype": "float32"}
    return Learner(model, with_values(config, **{**usual, **values}), ranks=ranks)


def lines(run: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if not kinds or line["event"] in kinds]


def losses(run: Path) -> list[dict[str, Any]]:
    """Return what a run measured of its model, without what it measured of the clock."""
    return [
        {key: value for key, value in line.items() if key not in CLOCKED}
        for line in lines(run, "step", "eval", "observe", "prune", "remap", "state", "sample")
    ]


def tensors(run: Path, checkpoint: str = "last") -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint."""
    path, found = run / "checkpoints" / checkpoint, {}
    for kind in ("weights", "masks", "optimizer", "extra"):
        saved = SavedTensors(read_manifest(path), kind)
        found.update({f"{kind}:{name}": saved.read(name).clone() for name in saved.specs})
    return found


def assert_same_run(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    for name in ("last", "best"):
        ours, theirs = tensors(one, name), tensors(other, name)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert torch.equal(tensor, theirs[key]), key


def clipped_step(model: torch.nn.Module, opt: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """Take a step, and return the norm of the gradient before it is clipped."""
    opt.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return float(norm)


class Watcher:
    """Listens, and does something after a step."""

    def __init__(self, step: int = 0, action: Callable[[], object] | None = None) -> None:
        self.seen: list[Event] = []
        self.step = step
        self.action = action

    def on(self, event: Event) -> None:
        self.seen.append(event)
        if isinstance(event, events.Ticked) and event.step == self.step and self.action:
            self.action()


def interrupt_at(step: int, number: int = signal.SIGTERM) -> Watcher:
    return Watcher(step, lambda: signal.raise_signal(number))


class CrashError(Exception):
    pass


def crash_at(step: int) -> Watcher:
    def crash() -> None:
        raise CrashError

    return Watcher(step, crash)
