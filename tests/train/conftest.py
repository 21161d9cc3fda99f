"""Fixtures that these tests share."""

from tests.train.helpers import finished, here, run, text, type_in

__all__ = ["finished", "here", "run", "text", "type_in"]
