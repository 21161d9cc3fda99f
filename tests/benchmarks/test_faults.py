"""The campaigns of damaged files and failing calls run, and find nothing, at toy size."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.faults import failures, mutations


@pytest.mark.long
@pytest.mark.parametrize("campaign", [failures, mutations])
def test_a_toy_campaign_finds_nothing(
    campaign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["campaign", "--toy", "--out", str(out)])
    campaign.main()
    total = [json.loads(line) for line in out.read_text().splitlines()][-1]
    assert sum(total[outcome] for outcome in campaign.OUTCOMES) >= 20
    assert not any(total[outcome] for outcome in campaign.BAD)
