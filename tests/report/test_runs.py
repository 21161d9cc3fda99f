"""Run folders read back: whole, cut off, and what is not a run at all."""

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

import samo
from samo.report.runs import read_run, read_runs
from samo.train.events import Ended, Resumed
from tests.report.runs import (
    KEPT,
    NUM_PARAMS,
    evaluated,
    gradual,
    remapped,
    stepped,
    write_events,
    write_run,
)


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "notes", sample="def f(): ..."))
    assert (run.name, run.mode, run.dtype, run.num_params) == (
        "notes",
        "samo",
        "float32",
        NUM_PARAMS,
    )
    assert len(run.steps) == run.last_step == 300
    assert [(len(phase), phase[0].phase) for phase in run.phases] == [(100, "dense"), (200, "samo")]
    assert [e.step for e in run.evals] == [50, 100, 150, 200, 250, 300]
    assert run.last_eval is run.evals[-1]
    assert run.prune is run.masks is not None
    assert (run.prune.step, run.prune.kept) == (100, KEPT)
    assert run.state is not None
    assert run.state.measured_bytes == sum(run.state.measured.values()) == 5_816_112
    assert run.sample is not None
    assert run.sample.text == "def f(): ..."
    assert (run.end, run.broken_lines) == ("done", 0)
    assert run.elapsed_s == pytest.approx(36.6)


def test_a_killed_run_lacks_its_last_line_and_its_end(tmp_path: Path) -> None:
    file = write_run(tmp_path, end=None) / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-30])  # within the last validation
    run = read_run(tmp_path)
    assert (run.broken_lines, run.end, len(run.steps)) == (1, None, 300)
    assert [e.step for e in run.evals] == [50, 100, 150, 200, 250]


def test_a_run_without_metrics_has_not_begun(tmp_path: Path) -> None:
    (write_run(tmp_path) / "metrics.jsonl").unlink()
    run = read_run(tmp_path)
    assert run.last_step == 0
    assert (run.last_eval, run.prune, run.state, run.end) == (None, None, None, None)
    assert math.isnan(run.elapsed_s)


def test_the_last_finite_loss_the_last_step_and_the_last_end_count(tmp_path: Path) -> None:
    events = [evaluated(1, 3.0), evaluated(2, math.nan), Ended(step=3, reason="interrupted")]
    run = read_run(write_events(write_run(tmp_path), events))
    assert run.last_eval is run.evals[0]
    assert (run.last_step, run.end) == (3, "interrupted")
    events.append(Resumed(step=3, steps=9, time=0.0))
    assert read_run(write_events(tmp_path, events)).end is None


def test_what_is_kept_is_what_the_last_change_left(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", sparsity=0.0, more=gradual()))
    assert run.is_pruned_in_steps
    assert run.masks is not None
    assert (run.masks.step, run.masks.kept) == (250, KEPT)
    moved = remapped(150, KEPT, KEPT, KEPT // 4)
    run = read_run(write_run(tmp_path / "b", more=[moved]))
    assert not run.is_pruned_in_steps
    assert run.changes[0].replaced == pytest.approx(0.25, abs=1e-3)


def test_an_odd_description_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    changes = {"config": [1, 2], "model": None, "ranks": {"pipe": "x", "data": -1}, "name": None}
    run = read_run(write_run(tmp_path / "third", steps=1, changes=changes))
    assert (run.name, run.mode, run.num_params, run.num_ranks) == ("third", "", None, 1)


def test_what_is_not_a_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(samo.RunError, match="it does not exist; pass a folder that 'samo train'"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(samo.RunError, match=r"it has no run\.json; pass a folder"):
        read_run(tmp_path)
    for name in "abcde":
        write_run(tmp_path / name, steps=1)
    with pytest.raises(samo.RunError, match="it is a file; pass the folder around it"):
        read_run(tmp_path / "a" / "run.json")
    with pytest.raises(samo.RunError, match=r"there are runs in it.*/a'.*/c' and 2 more"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read: .* take another copy of the run"),
        ("[" * 100_000, "cannot be read: .* take another copy of the run"),
        ('{"format": "other"}', "is not the record of a run .*; pass a folder"),
        ('{"format": "samo-run", "version": 2}', "has version 2, this samo reads version 1; use"),
    ],
    ids=["cut", "deep", "other", "later"],
)
def test_a_damaged_or_foreign_description_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (write_run(tmp_path, steps=1) / "run.json").write_text(text)
    with pytest.raises(samo.RunError, match=message):
        read_run(tmp_path)


def test_runs_of_the_same_name_are_labelled_apart(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name, steps=2) for name in "ab")
    runs = read_runs([a, b, a])
    assert [run.label for run in runs] == ["notes (a)", "notes (b)", "notes (a) #3"]
    assert [run.place for run in runs] == [0, 1, 2]


def test_a_hundred_thousand_lines_are_read_quickly(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=1)
    (folder / "metrics.jsonl").write_text((stepped(1).to_json() + "\n") * 100_000)
    start = time.process_time()
    assert len(read_run(folder).steps) == 100_000
    assert time.process_time() - start < 10  # 2 s on an AMD EPYC; a busy machine takes longer


def test_reading_loads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, samo.report.runs, samo.report.findings; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "matplotlib", "numpy"} & set(done.stdout.split())
