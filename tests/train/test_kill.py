"""Runs that are killed (SIGKILL) at random moments and resumed equal runs that were not."""

import multiprocessing
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samo.train.config import PruneConfig
from samo.train.trainer import resume, train
from tests.train.helpers import assert_same_run, small, text

__all__ = ["text"]

CASES = {
    "magnitude": (PruneConfig(dense_steps=3), 24, 8),
    "early-bird": (
        PruneConfig(method="early-bird", queue=3, mask_every=1, threshold=0.3, dense_steps=7),
        12,
        3,
    ),
    "rigl": (PruneConfig(method="rigl", mask_every=2, mask_stop=7), 12, 4),
}
"""Settings, steps and kills."""


def train_or_resume(text: Path, run: Path, name: str) -> None:
    """Do what a user does who types the same command after every crash; runs in a process."""
    torch.set_num_threads(1)
    prune, steps, _ = CASES[name]
    if (run / "run.json").exists():
        resume(run)
    else:
        config = small(text, steps=steps, save_every=2, eval_every=5)
        train(replace(config, prune=prune), run)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_at_random_moments_and_resumed_equals_the_undisturbed_one(
    tmp_path: Path, text: Path, name: str
) -> None:
    num_kills = CASES[name][2]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["samo.train.trainer", "samo.kernels.cpu", "torch.utils.tensorboard"]
    )

    def start(run: Path) -> "multiprocessing.context.ForkServerProcess":
        process = context.Process(target=train_or_resume, args=(text, run, name))
        process.start()
        return process

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = start(whole)
    metrics = killed / "metrics.jsonl"

    def grown(before: int) -> int:
        """Bytes of metrics since; a resume may drop some first."""
        return abs(metrics.stat().st_size - before) if metrics.exists() else 0

    draw = random.Random(5)
    kills, moments = 0, set()
    while True:
        process = start(killed)
        # Wait for a few lines, so that it gets somewhere at any speed; then a little, to hit any
        # moment.
        wanted = draw.randint(0, 6)
        before = metrics.stat().st_size if metrics.exists() else 0
        while process.is_alive() and grown(before) < 250 * wanted:
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.02))
        if kills < num_kills:
            process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        moments.add(metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
    assert kills >= num_kills // 2  # fewer would mean that it ended before it was killed
    assert len(moments) > num_kills // 4
    undisturbed.join()
    assert undisturbed.exitcode == 0
    assert_same_run(whole, killed)
    masks = [(run / "masks.safetensors").read_bytes() for run in (whole, killed)]
    assert masks[0] == masks[1]
