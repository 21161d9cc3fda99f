"""Reading run folders back: whole, cut off, damaged, and what is not a run at all."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

import samo
from samo.report.runs import read_run
from tests.train.runs import NUM_PARAMS, STARTED, write_metrics, write_run


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "notes", sample="def f(): ..."))
    assert (run.name, run.mode, run.dtype, run.started) == ("notes", "samo", "float32", STARTED)
    assert run.command == "samo train notes.txt --run.mode samo"
    assert run.num_params == NUM_PARAMS
    assert len(run.steps) == run.last_step == 300
    assert run.steps.step[9] == 10
    assert run.steps.tokens[-1] == 2048 * 300
    assert run.steps.spans == [(0, 100, "dense"), (100, 300, "samo")]
    assert [e.step for e in run.evals] == [50, 100, 150, 200, 250, 300]
    assert run.last_eval is run.evals[-1]
    assert run.prune is not None
    assert (run.prune.step, run.prune.kept, run.prune.numel) == (100, 78_643, 786_432)
    assert run.prune.sparsity == pytest.approx(0.9, abs=1e-6)  # 78,643.2 is rounded
    assert run.state is not None
    assert run.state.measured_bytes == sum(run.state.measured.values()) == 5_816_112
    assert run.state.dense_bytes == 16 * NUM_PARAMS
    assert [sample.text for sample in run.samples] == ["def f(): ..."]
    assert (run.end, run.broken_lines) == ("done", 0)
    assert run.elapsed_s == pytest.approx(36.6)


def test_every_column_has_a_value_for_every_line(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    write_metrics(
        tmp_path, [{"event": "step", "step": 1}, {"event": "step", "step": 2, "step_ms": 0.5}]
    )
    steps = read_run(tmp_path).steps
    lengths = {len(getattr(steps, name)) for name in steps.__slots__ if name != "phases"}
    assert lengths == {2}
    assert math.isnan(steps.step_ms[0])
    assert steps.step_ms[1] == 0.5


def test_a_killed_run_lacks_its_last_line_and_its_end(tmp_path: Path) -> None:
    file = write_run(tmp_path, end=None) / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-30])  # in the middle of the last evaluation
    run = read_run(tmp_path)
    assert (run.broken_lines, run.end, len(run.steps)) == (1, None, 300)
    assert [e.step for e in run.evals] == [50, 100, 150, 200, 250]


def test_a_line_cut_inside_a_letter_is_a_broken_line(tmp_path: Path) -> None:
    file = write_run(tmp_path) / "metrics.jsonl"
    with open(file, "ab") as lines:
        lines.write('{"event": "sample", "text": "\u00e9'.encode()[:-1])
    assert read_run(tmp_path).broken_lines == 1


def test_a_run_without_metrics_has_not_begun(tmp_path: Path) -> None:
    (write_run(tmp_path) / "metrics.jsonl").unlink()
    run = read_run(tmp_path)
    assert len(run.steps) == run.last_step == 0
    assert (run.last_eval, run.prune, run.state, run.end) == (None, None, None, None)
    assert math.isnan(run.elapsed_s)


def test_losses_that_are_no_numbers_are_nan(tmp_path: Path) -> None:
    write_run(tmp_path)
    values = ["null", "NaN", "Infinity", '"high"', "true", "1" + 400 * "0", "2"]
    lines = [f'{{"event": "step", "step": {i}, "loss": {v}}}' for i, v in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = read_run(tmp_path)
    assert [math.isnan(loss) for loss in run.steps.loss] == [True] * 6 + [False]
    assert run.broken_lines == 0


def test_the_last_evaluation_with_a_number_counts(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_metrics(
        tmp_path,
        [
            {"event": "eval", "step": 1, "valid_loss": 3.0},
            {"event": "eval", "step": 2, "valid_loss": None},
        ],
    )
    last = read_run(tmp_path).last_eval
    assert last is not None
    assert last.step == 1
    assert read_run(tmp_path).last_step == 2


def test_unknown_events_fields_and_shapes_are_passed_over(tmp_path: Path) -> None:
    write_run(tmp_path, changes={"config": [1, 2], "model": None, "colour": "blue"})
    write_metrics(
        tmp_path,
        [
            {"event": "weather", "step": 3},
            {"event": "step", "step": 4, "loss": 1.5, "mood": "good"},
            {"event": "step", "loss": 9.0},
            {"event": "prune", "step": 5},
            {"event": "state", "step": 5, "measured": {"dense": 8, "magic": 1}, "predicted": 3},
        ],
    )
    run = read_run(tmp_path)
    assert (list(run.steps.loss), run.mode, run.num_params, run.prune) == ([1.5], "", None, None)
    assert run.state is not None
    assert (run.state.measured, run.state.predicted) == ({"dense": 8}, {})


def test_a_resumed_run_has_not_ended(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_metrics(tmp_path, [{"event": "end", "reason": "interrupted"}, {"event": "resume"}])
    assert read_run(tmp_path).end is None


def test_a_run_without_a_name_is_called_as_its_folder(tmp_path: Path) -> None:
    assert read_run(write_run(tmp_path / "third", changes={"name": None})).name == "third"


def test_what_is_no_run_folder_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(samo.RunError, match="it does not exist; give a folder that 'samo train'"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(samo.RunError, match=r"looked for run\.json and metrics\.jsonl in it"):
        read_run(tmp_path)
    run = write_run(tmp_path / "a")
    with pytest.raises(samo.RunError, match="it is a file; give the folder around it"):
        read_run(run / "run.json")


def test_a_folder_of_runs_names_the_runs_in_it(tmp_path: Path) -> None:
    for name in "abcde":
        write_run(tmp_path / name, steps=1)
    with pytest.raises(samo.RunError, match=r"found runs below it.*/a'.*/c' and 2 more"):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ["{", "\x00", "[" * 100_000], ids=["cut", "zeros", "deep"])
def test_a_damaged_description_is_refused(tmp_path: Path, text: str) -> None:
    (write_run(tmp_path) / "run.json").write_text(text)
    with pytest.raises(samo.RunError, match=r"run\.json' cannot be read: .* take another copy"):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ["[]", '"samo-run"', '{"format": "other"}'])
def test_json_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    (write_run(tmp_path) / "run.json").write_text(text)
    with pytest.raises(samo.RunError, match="does not describe a run: its format is"):
        read_run(tmp_path)


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, changes={"version": 2})
    with pytest.raises(
        samo.RunError, match="has version 2, this samo reads version 1; update samo"
    ):
        read_run(tmp_path)


def test_metrics_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    file = write_run(tmp_path) / "metrics.jsonl"
    file.unlink()
    file.mkdir()
    with pytest.raises(
        samo.RunError, match=r"metrics\.jsonl' cannot be read: Is a directory; make"
    ):
        read_run(tmp_path)


def test_a_hundred_thousand_lines_are_read_quickly(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=1)
    line = (folder / "metrics.jsonl").read_text().splitlines()[1]
    (folder / "metrics.jsonl").write_text((line + "\n") * 100_000)
    start = time.process_time()
    assert len(read_run(folder).steps) == 100_000
    assert time.process_time() - start < 5  # 1.1 s on an AMD EPYC; a busy machine takes longer


def test_reading_loads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, samo.report.runs; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", f"import json; {code}"], capture_output=True)
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "matplotlib", "numpy"}


def findings_of(folder: Path, losses: dict[str, float]) -> str:
    from samo.report.findings import entries, loss_finding

    runs = []
    for name, loss in losses.items():
        path = folder / name
        write_run(path, name=name, steps=2)
        write_metrics(path, [{"event": "eval", "step": 2, "valid_loss": loss}])
        runs.append(read_run(path))
    return loss_finding(entries(runs))


def test_runs_with_equal_losses_share_their_place(tmp_path: Path) -> None:
    assert (
        findings_of(tmp_path / "a", {"samo": 2.3281, "lean": 2.3279, "dense": 2.2})
        == "dense has the lowest validation loss, 2.200; samo and lean the highest, 2.328"
    )
    assert (
        findings_of(tmp_path / "b", {"samo": 2.1, "lean": 2.1, "dense": 2.2})
        == "samo and lean have the lowest validation loss, 2.100; dense the highest, 2.200"
    )
    assert (
        findings_of(tmp_path / "c", {"samo": 2.1, "lean": 2.1})
        == "All runs have the same validation loss, 2.100"
    )


def test_the_last_step_is_that_of_any_event(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=2)
    lines = [{"event": "step", "step": 10, "loss": 2.0}, {"event": "end", "step": 13}]
    write_metrics(path, lines)
    assert read_run(path).last_step == 13


def test_what_was_before_pruning_is_told_from_what_came_right_after(tmp_path: Path) -> None:
    from samo.report.findings import entries, loss_finding

    path = write_run(tmp_path / "run", steps=2)
    write_metrics(
        path,
        [
            {"event": "eval", "step": 40, "valid_loss": 2.6},
            {"event": "prune", "step": 40, "kept": 1, "numel": 10},
            {"event": "eval", "step": 40, "valid_loss": 2.7},
            {"event": "eval", "step": 90, "valid_loss": 2.5},
        ],
    )
    assert (
        loss_finding(entries([read_run(path)]))
        == "At 90 % sparsity the validation loss reaches 2.500; it was 2.600 before pruning"
    )
