"""Fixtures that these tests share."""

from tests.train.helpers import finished, run, text

__all__ = ["finished", "run", "text"]
