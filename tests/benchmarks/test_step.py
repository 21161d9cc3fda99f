"""samo bench step with further contenders, and the page of streamed and compiled weights."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from benchmarks import contenders, figures, step
from benchmarks.measure import read_lines
from benchmarks.streamed import bench as streamed, page
from benchmarks.streamed.lines import LINES

from samo.bench.contenders import CONTENDERS
from samo.bench.step import contenders as chosen
from samo.train.resolve import check_ranges
from tests.bench.test_step import built
from tests.benchmarks.calling import call, rows_of


@pytest.fixture(autouse=True)
def all_contenders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add the further contenders for one test; other projects are not installed."""
    for name in ("flashoptim", "torchao.optim", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with mock.patch.dict(CONTENDERS, contenders.CONTENDERS):
        yield


# Contenders


def test_contenders_that_are_not_installed_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    only = ["--only", "masked,samo,autocast,torchao", "flashoptim"]
    assert step.main(["--quick", "--device", "cpu", "--out", str(out), *only]) == 0
    shown = capsys.readouterr().out
    rows = {row["name"]: row for row in read_lines(out / "rows.jsonl")}
    assert list(rows) == ["masked", "samo", "autocast", "flashoptim", "torchao"]
    for name in ("torchao", "flashoptim"):
        assert f"not measured: {name}: not installed (" in shown
        assert f"- {name}: not installed (" in (out / "README.md").read_text()
    assert rows["autocast"]["figures"]["state_bytes_per_param"] == pytest.approx(16, abs=0.02)
    call(figures.main, out)
    assert (out / "step.png").read_bytes().startswith(b"\x89PNG")
    assert ">autocast<" in (out / "step.svg").read_text()


@pytest.mark.parametrize("lean", ["", "-lean"])
def test_a_budget_is_a_fraction_of_the_bytes_of_dense_weights(
    lean: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = built("lean" if lean else "samo").account()
    assert account is not None
    dense = account.pruned.predicted["dense"] + account.unpruned.predicted["dense"]
    given: list[object] = []
    monkeypatch.setattr(contenders, "Samo", lambda *_, weights, state: given.append(weights))
    built(f"budget-50%{lean}")
    assert given == [dense // 2]


# Streamed and compiled weights


def row_of(name: str, ms: float, gb: float, line: str = "frontier") -> dict[str, Any]:
    figures = {
        "over_masked": ms / 317,
        "in_a_row_ms": ms,
        "in_a_row_over_masked": ms / 320,
        "peak_bytes": gb * 1e9,
        "peak_over_masked": gb / 56.7,
        "state_bytes_per_param": 3.5,
        "warm_up_s": 1.5,
        "compilations": 2,
    }
    return {
        "line": line,
        "name": name,
        "parameters": {"shape": "gpt3-2.7b", "batch_size": 8, "context": 1024, "sparsity": 0.9},
        **{"median": ms, "p20": ms, "p80": ms, "repeats": 9, "unit": "ms"},
        **{"figures": figures, "failure": None},
        **{"device_name": "a GPU", "versions": {"torch": "2.11"}, "date": "today", "commit": "c"},
    }


def test_every_line_can_be_measured() -> None:
    for line in LINES.values():
        check_ranges(line.config)
        assert chosen(line.config)


def test_lines_are_measured_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        seen.append(command[command.index("benchmarks.step") + 1 :])
        step.main(seen[-1])

    out = tmp_path / "rows.jsonl"
    stopped = subprocess.TimeoutExpired
    monkeypatch.setattr(streamed, "subprocess", SimpleNamespace(run=run, TimeoutExpired=stopped))
    rows = rows_of(streamed.main, out, "eager", "13b", "--toy")
    assert [command[command.index("--shape") + 1] for command in seen] == ["gpt3-2.7b", "gpt3-13b"]
    assert [(row["line"], row["name"]) for row in rows] == [
        ("eager", "masked"),
        ("eager", "samo"),
        ("eager", "streamed"),
        ("13b", "streamed"),
    ]
    assert "## 13B, 8 x 1,024, eager\n" in capsys.readouterr().out


def test_later_rows_stand_in_place_of_earlier_ones(tmp_path: Path) -> None:
    first = [row_of("streamed", 300, 8, "eager"), row_of("masked", 317, 56.7, "eager")]
    second = [row_of("samo", 20, 1, "graphs-125m"), row_of("streamed", 400, 8, "eager")]
    rows = page.merge([second[:1], first, second[1:]])
    found = [(row["line"], row["name"], row["median"]) for row in rows]
    assert found == [
        ("eager", "streamed", 400),
        ("eager", "masked", 317),
        ("graphs-125m", "samo", 20),
    ]
    page.write(tmp_path, rows)
    text = (tmp_path / "README.md").read_text()
    assert "| streamed | 400 | 400-400 | 1.26 | 400 | 1.25 |" in text
    assert "python -m benchmarks.step --repeats 9 --shape gpt3-2.7b" in text
    assert "frontier.png" not in text  # none of its rows
    names = ("samo", "lean", "streamed", "budget-25%-lean", "flashoptim")
    page.write(tmp_path, [row_of(name, 300 + i, 10 + i) for i, name in enumerate(names)])
    assert "](frontier.png)" in (tmp_path / "README.md").read_text()
    svg = (tmp_path / "frontier.svg").read_text()
    assert all(f">{text}<" in svg for text in ("streamed, exact", "25 %", "FlashOptim"))
