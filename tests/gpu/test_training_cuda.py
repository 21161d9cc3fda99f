"""Whole runs on a GPU: each kind learns, and goes on after a stop."""

import signal
from pathlib import Path
from typing import Any

import pytest

from samo.integrations.model_folders import open_compressed
from samo.train.trainer import resume, train
from tests.train.helpers import Watcher, interrupt_at, lines, small, text
from tests.train.test_finetune import STEPS, place, settings

__all__ = ["place", "text"]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["samo", "dense"])
def test_a_run_learns_on_a_gpu_and_goes_on_after_a_stop(
    tmp_path: Path, text: Path, mode: str, dtype: str
) -> None:
    often = {"eval_every": 20, "log_every": 5}
    config = small(text, mode=mode, dtype=dtype, steps=60, batch_size=8, lr=5e-3, **often)
    train(config, tmp_path / "whole")
    stop = Watcher(31, lambda: signal.raise_signal(signal.SIGINT))
    assert train(config, tmp_path / "stopped", listeners=[stop]).signal == signal.SIGINT
    resume(tmp_path / "stopped")
    first, *_, last = (line["valid_loss"] for line in lines(tmp_path / "whole", "eval"))
    assert last < first - 0.3
    again = lines(tmp_path / "stopped", "eval")[-1]["valid_loss"]
    # Sums on a GPU have no fixed order, so equal to what that order moves in 60 steps.
    assert again == pytest.approx(last, abs=0.05)
    assert lines(tmp_path / "whole", "step")[-1]["memory_bytes"] < 1e9


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("pruned", {"weights": "resident", "state": "exact"}),
        ("pruned", {"weights": "streamed", "state": "lean", "checkpointing": True}),
        ("dense", {"weights": "resident", "sparsity": 0.5}),  # pruned on the way, by Wanda
    ],
    ids=str,
)
def test_a_language_model_is_finetuned_on_a_gpu_and_goes_on_after_a_stop(
    tmp_path: Path, place: Path, model: str, changes: dict[str, Any]
) -> None:
    changes = {"device": "cuda", "dtype": "bfloat16", "teacher": place / "dense", **changes}
    run = tmp_path / "run"
    config = settings(place, model, **changes)
    assert train(config, run, listeners=[interrupt_at(3)]).signal is not None
    assert resume(run).step == STEPS
    assert len(lines(run, "eval")) == 3  # before training, after 2 steps and 4
    open_compressed(run / "model")  # raises unless it is whole
