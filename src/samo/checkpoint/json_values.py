"""Python values as JSON, exactly: what JSON cannot express is an object with one key that begins with ``$``.

nan, inf, -inf     {"$float": "nan"}
(0.9, 0.999)       {"$tuple": [0.9, 0.999]}, or a plain list without ``keep_tuples``
a tensor           {"$tensor": "its name in a file"}
{"$x": 1}          {"$$x": 1}: a caller's key never means one of the above
"""

import math
from collections.abc import Callable
from typing import Any, Final

__all__ = ["decode", "encode", "references"]

_MAX_DEPTH: Final = 100
_MAX_INT_BITS: Final = 4096
"""Python refuses to read numbers of more than 4,300 digits."""

_NONFINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

NameTensor = Callable[[Any, str], str | None]


def encode(
    value: Any,
    where: str,
    *,
    name_tensor: NameTensor = lambda value, where: None,
    keep_tuples: bool = False,
) -> Any:
    """Return a value as JSON can hold it.

    Example:
        >>> from samo.checkpoint import json_values
        >>> json_values.encode({"best": float("inf"), "betas": (0.9, 0.99)}, "extra")
        {'best': {'$float': 'inf'}, 'betas': [0.9, 0.99]}

    Args:
        value: None, a boolean, number or string, or lists, tuples and dicts of them.
        where: Name of the value in errors and for tensors; ``/key`` is added inside.
        name_tensor: Returns the name of a value in a file, or None if it is not a tensor.
        keep_tuples: Whether tuples come back as tuples rather than lists.

    Raises:
        TypeError: The value, or one in it, is of another type, or too deep or large for JSON.
    """

    def walk(value: Any, where: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise TypeError(
                f"{where} is nested more than {_MAX_DEPTH} levels deep; does it contain itself? "
                "A checkpoint takes flat values"
            )
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int) and value.bit_length() <= _MAX_INT_BITS:
            return int(value)
        if isinstance(value, float):
            number = float(value)
            return number if math.isfinite(number) else {"$float": str(number)}
        if isinstance(value, list | tuple):
            items = [walk(item, f"{where}/{i}", depth + 1) for i, item in enumerate(value)]
            return {"$tuple": items} if keep_tuples and isinstance(value, tuple) else items
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {
                f"${key}" if key.startswith("$") else key: walk(item, f"{where}/{key}", depth + 1)
                for key, item in value.items()
            }
        name = name_tensor(value, where)
        if name is not None:
            return {"$tensor": name}
        raise TypeError(
            f"{where} is a {type(value).__name__} that a checkpoint cannot hold; it takes tensors, "
            "numbers, strings, booleans, None, and lists and dicts of them with strings as keys"
        )

    return walk(value, where, 0)


def decode(value: Any, tensor: Callable[[str], Any] = str, *, depth: int = 0) -> Any:
    """Return the value that was encoded; ``tensor`` returns the tensor of a name.

    Example:
        >>> from samo.checkpoint import json_values
        >>> json_values.decode({"$tuple": [1, {"$float": "-inf"}]})
        (1, -inf)

    Raises:
        ValueError: A ``$`` key has no meaning, or the value is deeper than any encoded one.
    """
    if depth > 3 * _MAX_DEPTH:  # a tuple is two levels
        raise ValueError("it is nested too deep")
    depth += 1
    if isinstance(value, list):
        return [decode(item, tensor, depth=depth) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, item),) = value.items()
        if key == "$float" and isinstance(item, str) and item in _NONFINITE:
            return _NONFINITE[item]
        if key == "$tuple" and isinstance(item, list):
            return tuple(decode(entry, tensor, depth=depth) for entry in item)
        if key == "$tensor" and isinstance(item, str):
            return tensor(item)
    found = {}
    for key, item in value.items():
        if key.startswith("$") and not key.startswith("$$"):
            raise ValueError(f"'{key}' has no meaning here")
        found[key.removeprefix("$")] = decode(item, tensor, depth=depth)
    return found


def references(value: Any) -> list[str]:
    """Return the names of the tensors in an encoded value.

    Example:
        >>> from samo.checkpoint import json_values
        >>> json_values.references({"step": 1, "exp_avg": {"$tensor": "0.weight/exp_avg"}})
        ['0.weight/exp_avg']
    """
    names: list[str] = []
    decode(value, lambda name: names.append(name))
    return names
