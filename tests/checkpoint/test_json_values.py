"""Python values through JSON and back."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from samo.checkpoint.json_values import decode, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
keys = st.sampled_from(["a", "$float", "$tuple", "$items", "$tensor", "$", "$$x"])
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.integers(), inner)
    ),
    max_leaves=5,
)


@settings(max_examples=25)
@example({"$float": "nan"})
@example({"$tensor": "nan"})
@example([float("inf"), float("-inf"), float("nan"), -0.0])
@given(trees)
def test_every_value_comes_back_with_its_type(value: Any) -> None:
    text = json.dumps(encode(value, "x"), allow_nan=False)
    assert repr(decode(json.loads(text))) == repr(value)


@pytest.mark.parametrize(
    ("value", "where"),
    [({1}, "x"), ({"a": [0, b""]}, "x/a/1"), ({"a": {1: 2, "b": 3}}, "x/a"), (1j, "x")],
)
def test_what_json_lacks_is_refused_with_its_path(value: Any, where: str) -> None:
    with pytest.raises(TypeError, match=f"^{where} is a .*, which a checkpoint cannot hold; give"):
        encode(value, "x")


@pytest.mark.parametrize(
    "value",
    [
        {"$float": "1"},
        {"$float": 1},
        {"$tuple": 1},
        {"$items": [1]},
        {"$items": [["a", 1]]},
        {"$tensor": 1},
        {"$tensor": "x", "y": 2},
    ],
)
def test_a_key_without_a_meaning_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="have no meaning"):
        decode(value)


def test_values_that_are_too_deep_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="nested more than 100 levels deep"):
        encode(loop, "extra")
    deepest: Any = ()
    for _ in range(100):
        deepest = (deepest,)
    assert decode(encode(deepest, "x")) == deepest
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deep"):
        decode(deep)
