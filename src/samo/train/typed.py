"""Values of JSON and TOML files as the types that a dataclass declares. Imports no torch."""

import math
import types
import typing
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

__all__ = []


def typed(value: Any, hint: Any, folder: Path | None = None) -> Any:
    """Return a value as the type of a field.

    Relative paths start at ``folder``. A single value is taken for a tuple of one. Floats that are
    not finite become NaN.

    Raises:
        TypeError, ValueError, OverflowError: It is of another type.
    """
    if type(value) is hint and hint is not float:  # not isinstance: True is not an int here
        return value
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in inner:
            with suppress(TypeError, ValueError):
                return typed(value, option, folder)
    elif origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        kinds = [inner[0]] * len(items) if inner[-1] is Ellipsis else inner
        return tuple(typed(item, kind, folder) for item, kind in zip(items, kinds, strict=True))
    elif origin is list and isinstance(value, list):
        return [typed(item, inner[0], folder) for item in value]
    elif origin is dict and isinstance(value, dict):
        return {key: typed(item, inner[1], folder) for key, item in value.items()}
    elif hint is Path:
        return Path(value) if folder is None else folder / Path(value).expanduser()
    elif hint is float and type(value) in (int, float):
        return float(value) if math.isfinite(float(value)) else math.nan
    elif origin is Literal and value in inner:
        return value
    raise TypeError(f"{value!r} is not of type {hint}")
