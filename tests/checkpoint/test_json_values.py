"""Python values through JSON and back."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from samo.checkpoint import json_values

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def same(a: Any, b: Any) -> bool:
    """Compare with types, NaN equal to itself and 0.0 unequal to -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@given(trees)
def test_every_value_comes_back_with_its_type(value: Any) -> None:
    text = json.dumps(json_values.encode(value, "x", keep_tuples=True), allow_nan=False)
    assert same(json_values.decode(json.loads(text)), value)


def test_tuples_become_lists_where_they_do_not_matter() -> None:
    assert json_values.decode(json_values.encode((1, (2,)), "x")) == [1, [2]]


@pytest.mark.parametrize("key", ["$float", "$tuple", "$tensor", "$", "$$x", "plain"])
def test_no_key_of_a_caller_is_taken_for_a_sign(key: str) -> None:
    value = {key: "nan"}
    assert json_values.decode(json_values.encode(value, "x")) == value


def test_tensors_are_named_by_their_place_and_found_again() -> None:
    named: dict[str, object] = {}

    def name_tensor(value: Any, where: str) -> str | None:
        if not isinstance(value, bytes):
            return None
        named[where] = value
        return where

    value = {"a": b"1", "b": [b"2", 3]}
    encoded = json_values.encode(value, "w", name_tensor=name_tensor)
    assert sorted(named) == ["w/a", "w/b/0"] == sorted(json_values.references(encoded))
    assert json_values.decode(encoded, named.__getitem__) == value


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({1, 2}, "extra"),
        ({"a": [0, object()]}, "extra/a/1"),
        ({"a": {1: 2}}, "extra/a"),
        (b"bytes", "extra"),
        (1 << 5000, "extra"),
        (1j, "extra"),
    ],
    ids=["set", "object", "key", "bytes", "long", "complex"],
)
def test_what_json_cannot_hold_is_refused_by_name(value: Any, where: str) -> None:
    with pytest.raises(
        TypeError, match=f"^{where} is a .* that a checkpoint cannot hold; it takes"
    ):
        json_values.encode(value, "extra")


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="nested more than 100 levels deep; does it contain itself"):
        json_values.encode(loop, "extra")


@pytest.mark.parametrize(
    "value", [{"$float": "1"}, {"$float": 1}, {"$tuple": 1}, {"$tensor": 1}, {"$x": 1, "y": 2}]
)
def test_a_sign_that_means_nothing_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="has no meaning here"):
        json_values.decode(value)


def test_a_value_deeper_than_any_that_is_encoded_is_refused() -> None:
    deepest: Any = ()
    for _ in range(100):
        deepest = (deepest,)
    assert json_values.decode(json_values.encode(deepest, "x", keep_tuples=True)) == deepest
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deep"):
        json_values.decode(deep)


def test_numbers_that_are_not_finite_are_written_as_words() -> None:
    assert json_values.encode([math.inf, -math.inf], "x") == [{"$float": "inf"}, {"$float": "-inf"}]
