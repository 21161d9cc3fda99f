"""Fixtures that these tests share."""

from pathlib import Path

import pytest

from tests.train.helpers import finished, run, text, type_in

__all__ = ["finished", "run", "text", "type_in"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
