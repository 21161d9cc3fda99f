"""Python values through JSON and back."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from samo.checkpoint.json_values import decode, encode, references

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.sampled_from(["$float", "$tuple", "$tensor", "$", "$$x"])
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=8,
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


@settings(max_examples=50)
@example({"$float": "nan"})
@example({"$tensor": "nan"})
@example([float("inf"), float("-inf"), float("nan"), -0.0])
@given(trees)
def test_every_value_comes_back_with_its_type(value: Any) -> None:
    text = json.dumps(encode(value, "x", keep_tuples=True), allow_nan=False)
    assert same(decode(json.loads(text)), value)


def test_tuples_become_lists_where_they_do_not_matter() -> None:
    assert decode(encode((1, (2,)), "x")) == [1, [2]]


def test_tensors_are_named_by_their_place_and_found_again() -> None:
    named: dict[str, object] = {}

    def name_tensor(value: Any, where: str) -> str | None:
        if not isinstance(value, bytes):
            return None
        named[where] = value
        return where

    value = {"a": b"1", "b": [b"2", 3]}
    encoded = encode(value, "w", name_tensor=name_tensor)
    assert sorted(named) == ["w/a", "w/b/0"] == sorted(references(encoded))
    assert decode(encoded, named.__getitem__) == value


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
    message = f"^{where} is a .* that a checkpoint cannot hold; it takes"
    with pytest.raises(TypeError, match=message):
        encode(value, "extra")


@pytest.mark.parametrize(
    "value", [{"$float": "1"}, {"$float": 1}, {"$tuple": 1}, {"$tensor": 1}, {"$x": 1, "y": 2}]
)
def test_a_sign_without_a_meaning_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="has no meaning here"):
        decode(value)


def test_values_that_are_too_deep_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="nested more than 100 levels deep; does it contain itself"):
        encode(loop, "extra")
    deepest: Any = ()
    for _ in range(100):
        deepest = (deepest,)
    assert decode(encode(deepest, "x", keep_tuples=True)) == deepest
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deep"):
        decode(deep)
