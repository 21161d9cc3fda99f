"""The campaign of damaged files runs, and finds nothing, at toy size."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks.faults import mutations


@pytest.mark.long
def test_a_toy_campaign_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["mutations", "--toy", "--out", str(out)])
    mutations.main()
    total = [json.loads(line) for line in out.read_text().splitlines()][-1]
    assert sum(total[outcome] for outcome in mutations.OUTCOMES) >= 20
    assert not any(total[outcome] for outcome in mutations.BAD)
