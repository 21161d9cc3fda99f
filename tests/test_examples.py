"""The examples run, with fewer steps than they take for a reader."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def test_the_minimal_example_prunes_trains_on_and_shows_the_ledger(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(__file__).parents[1] / "examples" / "minimal.py"
    spec = importlib.util.spec_from_file_location("minimal", path)
    assert spec is not None
    assert spec.loader is not None
    minimal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimal)
    train = minimal.train

    def train_briefly(*args: Any, steps: int) -> None:
        train(*args, steps=steps // 50)

    monkeypatch.setattr(minimal, "train", train_briefly)
    minimal.main()
    printed = capsys.readouterr().out
    assert "78,644 of 786,432 weights kept, sparsity 0.900" in printed
    assert printed.count("validation loss") == 3
    assert "pruned, 786,432 parameters" in printed
