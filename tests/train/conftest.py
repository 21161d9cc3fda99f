"""Fixtures that these tests share."""

from tests.train.helpers import finished, run, text, type_in

__all__ = ["finished", "run", "text", "type_in"]
