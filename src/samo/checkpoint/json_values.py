"""Python values as JSON. What JSON lacks is an object with one key that begins with ``$``.

nan, inf, -inf     {"$float": "nan"}
(0.9, 0.999)       {"$tuple": [0.9, 0.999]}
{30: 1, 60: 1}     {"$items": [[30, 1], [60, 1]]}
a tensor           {"$tensor": "its name in a file"}; a setting: {"$tensor": ["F32", 0.001]}
{"$x": 1}          {"$$x": 1}: a caller's key never means one of the above
"""

import math
from collections.abc import Callable
from typing import Any, Final

_MAX_DEPTH: Final = 100
_NONFINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class TensorName(str):
    """What `decode` returns for a tensor by default."""

    __slots__ = ()


def encode(
    value: Any, where: str, tensor: Callable[[Any, str], Any] = lambda value, where: None
) -> Any:
    """Return a value as JSON; ``tensor`` returns that of a tensor, and None for anything else."""

    def walk(value: Any, where: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise TypeError(f"{where[:60]}... is nested more than {_MAX_DEPTH} levels deep")
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, list | tuple):
            items = [walk(item, f"{where}/{i}", depth + 1) for i, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {
                f"${key}" if key.startswith("$") else key: walk(item, f"{where}/{key}", depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, dict) and all(type(key) is int for key in value):
            return {
                "$items": [[key, walk(value[key], f"{where}/{key}", depth + 1)] for key in value]
            }
        found = tensor(value, where)
        if found is None:
            raise TypeError(
                f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; give "
                "tensors, numbers, strings, bools, None, or lists of them and dicts (keys: all "
                "strings, or all integers)"
            )
        return {"$tensor": walk(found, where, depth + 1)}

    return walk(value, where, 0)


def decode(value: Any, tensor: Callable[[Any], Any] = TensorName, depth: int = 0) -> Any:
    """Return the value that was encoded; ``tensor`` gets the JSON of a tensor."""
    if depth > 3 * _MAX_DEPTH:  # a tuple is two levels
        raise ValueError("it is nested too deep")
    depth += 1
    if isinstance(value, list):
        return [decode(item, tensor, depth) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, item),) = value.items()
        if key == "$float" and isinstance(item, str) and item in _NONFINITE:
            return _NONFINITE[item]
        if key == "$tuple" and isinstance(item, list):
            return tuple(decode(entry, tensor, depth) for entry in item)
        if key == "$items" and _are_pairs(item):
            return {number: decode(entry, tensor, depth) for number, entry in item}
        if key == "$tensor" and isinstance(item, str | list):
            return tensor(decode(item, depth=depth))
    if any(key.startswith("$") and not key.startswith("$$") for key in value):
        raise ValueError(f"the keys {list(value)[:3]} have no meaning")
    return {key.removeprefix("$"): decode(item, tensor, depth) for key, item in value.items()}


def _are_pairs(items: Any) -> bool:
    return isinstance(items, list) and all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in items
    )


def tensor_names(value: Any) -> list[str]:
    """Return the names of the tensors in an encoded value, sorted."""
    names: list[str] = []
    decode(value, names.append)
    return sorted(names)
