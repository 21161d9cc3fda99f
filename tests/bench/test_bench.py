"""samo bench from the command line, at toy size on a CPU, its clock, and its results."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from samo.bench import rows, timing
from samo.bench.rows import Results, Row, Table
from samo.cli.main import main
from samo.errors import RunError

FIELDS = "bench name parameters median p20 p80 repeats unit figures failure device device_name "
FIELDS += "cores threads versions date commit"
OPERATIONS = ["copy", "compress", "compress, to fp32", "expand"]
UPDATES = ["update, exact", "update, lean", "update, dense"]


def measured(folder: Path) -> dict[str, dict[str, Any]]:
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("kernels --sizes 12 --densities 0.1", [*OPERATIONS, *UPDATES]),
        ("step --only samo,masked lean", ["masked", "samo", "lean"]),
    ],
    ids=["kernels", "step"],
)
def test_a_measurement_writes_rows_and_a_page(
    arguments: str,
    names: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    words = ["bench", *arguments.split(), "--quick", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["samo", *words])
    assert main() == 0
    found = measured(out)
    assert list(found) == names
    for row in found.values():
        assert list(row) == FIELDS.split()
        assert row["failure"] is None
        assert 0 < row["p20"] <= row["median"] <= row["p80"]
        assert row["repeats"] == 2
    page, shown = (out / "README.md").read_text(), capsys.readouterr().out
    assert f"    samo bench {arguments} --quick --device cpu" in page
    assert page.count("\n| ") == 2 + len(names)
    assert str(out) in shown.replace("\n", "")
    if "samo" in names:
        account = found["samo"]["figures"]
        assert account["ledger_measured_bytes"] == account["ledger_predicted_bytes"]
        assert account["pruned_bytes_per_param"] == pytest.approx(3.53, abs=0.02)
        assert found["masked"]["figures"]["over_masked"] == 1


def test_without_a_folder_the_result_gets_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("samo.bench.step.measure", lambda *_: [Row(name="samo", parameters={})])
    for _ in range(2):
        assert main(["bench", "step", "--quick", "--device", "cpu"]) == 0
    folders = (tmp_path / "benchmarks" / "results").iterdir()
    first, second = sorted((path.name for path in folders), key=len)
    assert first.startswith("step-")
    assert second == f"{first}-2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("kernels --repeats 0", "--repeats must be 1 or more, got 0"),
        ("kernels --densities 0.1 1", "--densities must be more than 0 and less than 1, got 1.0"),
        (
            "kernels --sizes 26 60",
            "--sizes must be 10 or more and less than 35 (a power of 2), got 60",
        ),
        ("step --only samo,smao", "unknown contender 'smao' (did you mean 'samo'?)"),
        ("step --batch-size 0", "--batch-size must be 1 or more, got 0"),
        ("step --sparsity 1", "--sparsity must be more than 0 and less than 1, got 1.0"),
        ("kernels --device cuda", "--device cuda needs a GPU that torch can use"),
    ],
)
def test_wrong_settings_are_rejected(
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", *arguments.split()]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_failures_end_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["bench", "kernels", "--quick", "--out", str(tmp_path)]) == 1
    assert "notes.txt" in capsys.readouterr().err
    failed = [Row(name="samo", parameters={}, failure="no kernel")]
    monkeypatch.setattr("samo.bench.step.measure", lambda *_: failed)
    assert main(["bench", "step", "--quick", "--out", str(tmp_path / "out")]) == 1
    assert "nothing could be measured: samo: no kernel" in capsys.readouterr().err


def test_contenders_take_turns_and_preparation_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, now = [], [0.0]

    def run(name: str, seconds: float) -> None:
        heard.append(name)
        now[0] += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    times = timing.in_turns(
        {name: partial(run, name, 0.25) for name in "abc"},
        rounds=6,
        warm_up=1,
        prepare=lambda: run("-", 9.0),
    )
    assert times == {name: [250.0] * 6 for name in "abc"}
    assert heard[::2] == ["-"] * 21
    turns = ["".join(heard[1::2][start : start + 3]) for start in range(0, 21, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 2  # the order changes
    assert timing.ratio([1.0, 20.0, 300.0], [1.0, 10.0, 100.0]) == 2.0


def test_rows_and_page_say_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    results = partial(
        Results,
        name="kernels",
        command="samo bench kernels",
        device=torch.device("cpu"),
        tabulate=lambda found: Table(("operation", "ms"), [(row.name, "1") for row in found]),
        notes=["It rains."],
    )
    timed = Row.timed([1.0, 2.0, 3.0], name="copy", parameters={"numel": 8}, figures={"kept": 4})
    failed = [Row(name="expand", parameters={"n": n}, failure="no GPU") for n in (1, 2)]
    results(tmp_path / "new").save([timed, *failed])
    row = measured(tmp_path / "new")["copy"]
    assert (row["median"], row["p20"], row["p80"]) == (2.0, 1.0, 3.0)
    assert (row["repeats"], row["unit"], row["parameters"]) == (3, "ms", {"numel": 8})
    assert row["versions"]["torch"] == torch.__version__
    page = (tmp_path / "new" / "README.md").read_text()
    for text in ("    samo bench kernels\n", "- It rains.\n", "- expand: no GPU (2 times)\n"):
        assert text in page
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to .*file.*choose another folder with --out"):
        results(tmp_path / "file" / "out")


def test_an_installed_samo_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is installed in the repository of another project."""
    (tmp_path / ".git").mkdir()
    package = tmp_path / "site-packages" / "samo" / "bench"
    package.mkdir(parents=True)
    monkeypatch.setattr(rows, "__file__", str(package / "rows.py"))
    assert rows.commit() is None
