"""Run folders read back: whole, cut off, and folders that are not runs."""

import math
import os
from pathlib import Path
from typing import Any

import pytest

import samo
from samo.report.runs import read_run, read_runs
from samo.train.events import Ended, Resumed
from tests.report.runs import evaluated, write_events, write_run


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "notes"))
    assert (run.name, run.mode, run.dtype, run.num_params) == ("notes", "samo", "float32", 868_352)
    assert len(run.steps) == run.last_step == 300
    assert [(len(phase), phase[0].phase) for phase in run.phases] == [(100, "dense"), (200, "samo")]
    assert [e.step for e in run.evals] == [50, 100, 150, 200, 250, 300]
    assert run.last_eval is run.evals[-1]
    assert run.prune is run.masks
    assert (run.end, run.broken_lines) == ("done", 0)
    assert run.elapsed_s == pytest.approx(36.6)


def test_runs_that_were_killed_or_have_not_begun_are_read(tmp_path: Path) -> None:
    file = write_run(tmp_path, end=None) / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-30])  # within the last validation
    run = read_run(tmp_path)
    assert (run.broken_lines, run.end, len(run.steps), len(run.evals)) == (1, None, 300, 5)
    file.unlink()
    run = read_run(tmp_path)
    assert (run.last_step, run.last_eval, run.prune, run.state, run.end) == (0, *[None] * 4)
    assert math.isnan(run.elapsed_s)


def test_the_last_finite_loss_and_the_last_end_count(tmp_path: Path) -> None:
    events = [
        evaluated(1, 3.0),
        evaluated(2, math.nan),
        evaluated(2**65, 1.0),
        Ended(step=3, reason="interrupted"),
    ]
    run = read_run(write_events(write_run(tmp_path), events))
    assert run.last_eval is run.evals[0]
    assert (run.last_step, run.end) == (3, "interrupted")
    events.append(Resumed(step=3, steps=9, time=0.0))
    assert read_run(write_events(tmp_path, events)).end is None


def test_an_odd_run_json_is_read_as_far_as_possible(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"config": [1, 2], "ranks": {"pipe": "x", "data": -1}, "name": None}
    for model in (None, {"num_params": 10**400}, {"num_params": -1}):
        changes["model"] = model
        run = read_run(write_run(tmp_path / "third", steps=1, changes=changes))
        assert (run.name, run.mode, run.num_params, run.num_ranks) == ("third", "", None, 1)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        samo.RunError, match="it does not exist; pass a folder that samo train or samo finetune"
    ):
        read_run(tmp_path / "nowhere")
    for name in "ab":
        write_run(tmp_path / name, steps=1)
    with pytest.raises(samo.RunError, match=r"it has no run\.json; pass its runs: '.*/a', '.*/b'"):
        read_run(tmp_path)
    (tmp_path / "b" / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "b" / "metrics.jsonl")
    with pytest.raises(samo.RunError, match="is not a regular file; leave this run out"):
        read_run(tmp_path / "b")
    (tmp_path / "a" / "run.json").write_text("[" * 100_000)
    with pytest.raises(samo.RunError, match="cannot be read"):
        read_run(tmp_path / "a")


def test_runs_of_the_same_name_get_different_labels(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name, steps=2) for name in "ab")
    runs = read_runs([a, b, a])
    assert [run.label for run in runs] == ["notes (a)", "notes (b)", "notes (a) #3"]
    assert [run.place for run in runs] == [0, 1, 2]
