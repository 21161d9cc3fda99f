"""Whole runs on a GPU: each type learns, and goes on after a stop."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from samo.train.config import OptimConfig
from samo.train.trainer import resume, train
from tests.train.helpers import Watcher, lines, small, text

__all__ = ["text"]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["samo", "dense"])
def test_a_run_learns_on_a_gpu_and_goes_on_after_a_stop(
    tmp_path: Path, text: Path, mode: str, dtype: str
) -> None:
    config = small(text, mode=mode, dtype=dtype, steps=60, eval_every=20, batch_size=8, log_every=5)
    config = replace(config, optim=OptimConfig(lr=5e-3))
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
