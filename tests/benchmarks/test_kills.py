"""The benchmark that kills runs: it finds a run whole, and sees when one is not."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from benchmarks.faults import kills

from tests.train.helpers import finished, run

__all__ = ["finished", "run"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_is_killed_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["kills", "--toy", "--cases", "magnitude", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    kills.main()
    killed, compared = (json.loads(line) for line in out.read_text().splitlines())
    assert killed["whole"]
    assert killed["all_gone"]
    assert compared["is_equal"], compared["error"]


def test_differences_and_leftovers_are_seen(finished: Path, run: Path) -> None:
    assert kills.difference(run, finished) == ""
    assert kills.leftovers(run) == set()
    (run / "checkpoints" / "best" / "data-00000000").mkdir()
    (run / ".run.json.1234").touch()
    assert kills.leftovers(run) == {"checkpoints/best/data-00000000", ".run.json.1234"}
    shutil.rmtree(run / "checkpoints" / "best")
    assert kills.difference(run, finished).startswith("checkpoints {'last'} instead of {")
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 7, "phase"', '"step": 9, "phase"'))
    assert "'step': 9" in kills.difference(run, finished)
