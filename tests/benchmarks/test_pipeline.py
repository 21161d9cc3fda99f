"""The benchmark of pipelines compares equals: limits as counted, and the table that it prints."""

import json
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from benchmarks.pipeline import bench, contenders
from benchmarks.pipeline.bench import Case, table

FIXED: Final = {
    "torch Schedule1F1B": [4, 3, 2, 1],
    "torch Schedule1F1B, one more": [5, 4, 3, 2],
}


def made(contender: str, median: float, low: float, high: float) -> Any:
    return {
        "stages": "jittering",
        "contender": contender,
        "held": "4 3 2 1",
        "step_ms": 1234.4,
        "step_p20_ms": 999.6,
        "step_p80_ms": 1300.0,
        "paired_ratio": median,
        "paired_ratio_p20": low,
        "paired_ratio_p80": high,
        "spread": 0.5,
    }


@pytest.mark.slow
def test_contenders_hold_as_many_as_they_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench", "--toy", "--rounds", "1", "--out", str(out)])
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # it takes long to load
    cases = {"late": Case(1.2, micro_batches=6)}
    monkeypatch.setattr(bench, "CASES", cases)
    bench.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    printed = capsys.readouterr().out
    assert "deepspeed is not installed; left out" in printed
    assert table(rows) in printed
    names = [row["contender"] for row in rows]
    assert names == [*contenders.SAME, *contenders.ONE_MORE]
    for row in rows:
        name, held = row["contender"], [int(number) for number in row["held"].split()]
        if name in FIXED:
            assert held == FIXED[name]
        else:
            limits = [int(number) for number in name.partition("limits ")[2].split()]
            assert all(1 <= number <= limit for number, limit in zip(held, limits, strict=True))


def test_the_table_names_a_case_once_and_what_is_surely_faster_in_bold() -> None:
    rows = [
        made("torch Schedule1F1B", 1.0, 1.0, 1.0),
        made("fast", 0.9, 0.85, 0.99),
        made("fast at times", 0.9, 0.85, 0.999),
        made("next", 1.1, 1.05, 1.2) | {"stages": "even", "spread": 0.0},
    ]
    assert table(rows).splitlines()[2:] == [
        "| jittering (log-normal, sigma 0.5) | torch Schedule1F1B | 4 3 2 1 | 1,234 (1,000-1,300) | 1.00 |",
        "| | fast | 4 3 2 1 | 1,234 (1,000-1,300) | **0.90** (0.85-0.99) |",
        "| | fast at times | 4 3 2 1 | 1,234 (1,000-1,300) | 0.90 (0.85-1.00) |",
        "| even | next | 4 3 2 1 | 1,234 (1,000-1,300) | 1.10 (1.05-1.20) |",
    ]
