"""Settings in files: the TOML that a user writes, the JSON that a run records. Imports no torch.

A file may leave out settings, but an unknown key is an error that names the nearest one.
"""

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_type_hints

from samo.errors import ConfigError, nearest
from samo.train.config import TrainConfig
from samo.utils.formatting import shortened

Config = TypeVar("Config")

_NAMES: Final = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
}
_WRONG: Final = (TypeError, ValueError, OverflowError)
"""What `typed` raises for a value of another type."""


def read_toml(path: Path, kind: type[Any] = TrainConfig) -> Any:
    """Read settings from a TOML file; paths in it are relative to the file's folder."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config '{path}': {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise ConfigError(f"the config '{path}' is not valid TOML: {error}") from None
    return from_dict(kind, content, source=f"the config '{path}'", folder=path.parent)


def to_dict(config: Any) -> dict[str, Any]:
    """Return the settings as nested dictionaries of JSON's types."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return plain


def from_dict(
    kind: type[Config], content: Any, *, source: str, folder: Path | None = None
) -> Config:
    """Build settings from sections, as `to_dict` returns them or a file holds them.

    ``source`` names them in errors; relative paths start at ``folder``.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{source} holds {type(content).__name__}, not sections of settings")
    kinds, sections = get_type_hints(kind), {}
    for name, values in content.items():
        if name not in kinds:
            homes = [key for key, hint in kinds.items() if name in get_type_hints(hint)]
            home = f"; it belongs under [{homes[0]}]" if homes else ""
            known = home or f"; the sections are {', '.join(f'[{key}]' for key in kinds)}"
            raise ConfigError(f"{source} has an unknown key '{name}'{nearest(name, kinds)}{known}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: '{name}' is a section, [{name}], and got {values!r}")
        hints, section = get_type_hints(kinds[name]), {}
        for key, value in values.items():
            if key not in hints:
                close = nearest(key, hints) or f"; [{name}] takes {', '.join(hints)}"
                raise ConfigError(f"{source} has an unknown key '{name}.{key}'{close}")
            try:
                section[key] = typed(value, hints[key], folder)
            except (*_WRONG, RuntimeError):  # the last: "~name" of an unknown user
                got = shortened(json.dumps(value, default=str), 80)
                raise ConfigError(
                    f"{source}: '{name}.{key}' takes {_named(hints[key])}, got {got}"
                ) from None
        sections[name] = section
    return kind(**{name: kinds[name](**values) for name, values in sections.items()})


def typed(value: Any, hint: Any, folder: Path | None = None) -> Any:
    """Return a value as the type of a field, or raise one of `_WRONG`.

    Relative paths start at ``folder``. A single value is taken for a tuple of one. Floats that are
    not finite become NaN.
    """
    if type(value) is int and abs(value) >= 2**63:
        raise OverflowError("a whole number of more than 64 bits")
    if type(value) is hint and hint is not float:  # not isinstance: True is not an int here
        return value
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in inner:
            with suppress(*_WRONG):
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


def _named(hint: Any) -> str:
    """Return a type in the words of a user."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_named(option) for option in inner if option is not types.NoneType)
    if origin is tuple:
        length = "" if inner[-1] is Ellipsis else f"{len(inner)} entries, "
        return f"a list ({length}each {_named(inner[0])})"
    if origin is dict:
        return f"a table (each value {_named(inner[1])})"
    return _NAMES[hint]
