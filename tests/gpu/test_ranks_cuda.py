"""Ranks that share one GPU, over gloo, train as one rank does."""

from pathlib import Path
from typing import Any

import pytest

from samo.train.trainer import train
from tests.ranks import run_ranks
from tests.train.test_many_ranks import lines, small, tensors, text, train_here

__all__ = ["text"]

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_ranks", "mesh"),
    [
        (2, {}),
        (4, {}),
        (2, {"pipe": 2}),
        (4, {"pipe": 2}),
    ],
    ids=str,
)
def test_ranks_on_one_gpu_have_the_losses_of_one(
    tmp_path: Path, text: Path, num_ranks: int, mesh: dict[str, Any], dtype: str
) -> None:
    how = {"device": "cuda", "dtype": dtype, "batch_size": 8}
    train(small(text, **how), tmp_path / "one")
    many = small(text, **how, **mesh, timeout_s=60.0)
    run_ranks(num_ranks, train_here, {tmp_path / "many": many}, timeout_s=100)
    # bfloat16 rounds sums of parts otherwise than sums of the whole, by 1 part in 256 of an entry.
    close = {"rel": 1e-4 if dtype == "float32" else 3e-3}
    for event, name in (("step", "loss"), ("eval", "valid_loss")):
        ours, theirs = (
            [line[name] for line in lines(tmp_path / run, event)] for run in ("one", "many")
        )
        assert theirs == pytest.approx(ours, **close)
    assert tensors(tmp_path / "one").keys() == tensors(tmp_path / "many").keys()
