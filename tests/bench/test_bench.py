"""samo bench from the command line: every question runs on a CPU at toy size."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from samo.bench.settings import QUESTIONS
from samo.cli.commands import Bench
from samo.cli.main import main, parse

FIELDS = {
    "bench", "name", "parameters", "median", "p20", "p80", "repeats", "unit", "figures", "failure",
    "device", "device_name", "versions", "date", "commit",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a minute to load and to compile; what is around them is tried here."""
    for name in ("flashoptim", "torchao.optim", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)


def measured(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(question.name, marks=[pytest.mark.long] if question.name == "kernels" else [])
        for question in QUESTIONS.values()
    ],
)
def test_a_question_leaves_rows_a_page_and_figures(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["bench", name, "--quick", "--device", "cpu", "--out", str(out)]) == 0
    rows = measured(out)
    assert rows
    for row in rows:
        assert set(row) == FIELDS
        assert (row["median"] is None) == (row["failure"] is not None)
        if row["median"] is not None:
            assert 0 < row["p20"] <= row["median"] <= row["p80"]
            assert row["repeats"] == 2
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    svg = (out / f"{name}.svg").read_text()
    assert "<svg" in svg
    assert "$" not in svg  # ticks are plain text
    page = (out / "README.md").read_text()
    command = f"samo bench {name} --out {shlex.quote(str(out))} --device cpu --quick"
    assert f"    {command}\n" in page
    assert f"]({name}.png)" in page
    assert str(out) in capsys.readouterr().out.replace("\n", "")


def test_steps_name_the_peers_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["bench", "step", "--quick", "--device", "cpu", "--out", str(out)]
    assert main([*arguments, "--only", "samo,dense,torchao", "bitsandbytes"]) == 0
    shown = capsys.readouterr().out
    rows = {row["name"]: row for row in measured(out)}
    assert list(rows) == ["dense", "samo", "torchao", "bitsandbytes"]
    for name in ("torchao", "bitsandbytes"):
        assert f"not measured: {name}: not installed" in shown
        assert f"- {name}: not installed" in (out / "README.md").read_text()
    found = rows["samo"]["figures"]
    assert found["ledger_measured_bytes"] == found["ledger_predicted_bytes"]
    assert found["pruned_bytes_per_param"] == pytest.approx(3.53, abs=0.02)
    assert "B/param on pruned tensors" in shown


def test_without_a_folder_the_result_gets_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["bench", "step", "--quick", "--device", "cpu", "--only", "dense"]
    assert main(arguments) == 0
    assert main(arguments) == 0
    first, second = sorted(
        (tmp_path / "benchmarks" / "results").iterdir(), key=lambda p: len(p.name)
    )
    assert first.name.startswith("step-")
    assert second.name == f"{first.name}-2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("kernels --repeats 0", "repeats must be 1 or more"),
        ("kernels --densities 2", "densities must lie between 0 and 1"),
        ("step --only smao", "did you mean 'samo'"),
    ],
)
def test_wrong_settings_are_wrong_usage(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "kernels", "--device", "cuda"]) == 2
    assert "this machine has none that torch can use" in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["bench", "kernels", "--quick", "--out", str(tmp_path)]) == 1
    assert "is not empty (it holds 'notes.txt')" in capsys.readouterr().err


def test_nothing_measured_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert (
        main(["bench", "step", "--quick", "--device", "cpu", "--only", "torchao", "--out", out])
        == 1
    )
    assert "nothing could be measured: torchao: not installed" in capsys.readouterr().err


def test_the_questions_are_subcommands() -> None:
    for config, question in QUESTIONS.items():
        command = parse(["bench", question.name, "--repeats", "7"])
        assert isinstance(command, Bench)
        assert command.question == config(repeats=7)
