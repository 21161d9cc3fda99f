"""The benchmark of pipelines compares equals: limits as counted."""

import json
import sys
from pathlib import Path
from typing import Final

import pytest
from benchmarks.pipeline import bench, contenders
from benchmarks.pipeline.bench import Case, table

FIXED: Final = {
    "torch Schedule1F1B": [4, 3, 2, 1],
    "torch Schedule1F1B, one more": [5, 4, 3, 2],
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
