"""A quick disk for all tests of checkpoints."""

import os

import pytest


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of fsyncs take seconds; test_atomic_io.py has real ones."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
