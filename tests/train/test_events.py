"""Events written to metrics.jsonl and read back: whole, cut off and damaged."""

import dataclasses
import math
import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

import pytest

from samo.errors import RunError
from samo.train import events
from samo.train.events import Ended, Evaluated, Event, from_json, read_events


def example(hint: Any) -> Any:
    """Return a value of a type that tells it from others."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return inner[-1]
    if origin is UnionType:
        return example(inner[0])
    if origin in (list, dict):
        return [example(inner[0])] * 2 if origin is list else {"dense": example(inner[1])}
    return {int: 7, float: 0.5, str: 'caf\u00e9 "x"\n'}[hint]


@pytest.mark.parametrize("kind", events.NAMES, ids=lambda kind: kind.__name__)
def test_every_event_survives_the_file(kind: type[Event]) -> None:
    hints = typing.get_type_hints(kind)
    values = {entry.name: example(hints[entry.name]) for entry in dataclasses.fields(kind)}
    assert from_json(kind(**values).to_json()) == kind(**values)
    optional = [name for name, hint in hints.items() if NoneType in typing.get_args(hint)]
    event = kind(**values | dict.fromkeys(optional))
    assert from_json(event.to_json()) == event


EVAL = (
    '{"event": "eval", "step": 3, "valid_loss": %s, "perplexity": 1, "tokens": 5, "elapsed_s": 1}'
)


@pytest.mark.parametrize("value", ["null", "NaN", "Infinity", "1e999"])
def test_a_float_that_is_not_finite_is_nan(value: str) -> None:
    event = from_json(EVAL % value)
    assert isinstance(event, Evaluated)
    assert math.isnan(event.valid_loss)
    assert '"valid_loss": null' in event.to_json()


WRONG_TYPES = [EVAL % value for value in ('"high"', "true", "[]", "1" + 400 * "0")]
NO_EVENTS = ["{", "[]", "3", "{}", '{"event": []}', '{"event": "end", "step": 1}']


@pytest.mark.parametrize("line", [*WRONG_TYPES, *NO_EVENTS, "[" * 100_000, b"\xc3"], ids=range(12))
def test_a_line_that_is_not_an_event_is_refused(line: str | bytes) -> None:
    with pytest.raises(ValueError, match="not an event"):
        from_json(line)


def test_unknown_events_and_fields_are_ignored() -> None:
    assert from_json('{"event": "weather", "step": 3}') is None
    line = '{"event": "end", "step": 3, "reason": "done", "mood": "good"}'
    assert from_json(line) == Ended(step=3, reason="done")


def test_a_torn_last_line_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    whole = Ended(step=1, reason="interrupted")
    torn = '{"event": "sample", "text": "\u00e9'.encode()[:-1]  # within a character
    file.write_bytes(f"{whole.to_json()}\n\n".encode() + torn)
    assert read_events(file) == ([whole], 1)


def test_a_file_that_is_missing_is_empty_and_one_that_cannot_be_read_an_error(
    tmp_path: Path,
) -> None:
    assert read_events(tmp_path / "nothing") == ([], 0)
    with pytest.raises(RunError, match="cannot be read: it is not a file; leave this run out"):
        read_events(tmp_path)
