"""Settings in files: the TOML file that a user writes, and the JSON that a run records. Imports no torch.

A file may leave out settings, but an unknown key is an error that names the nearest one.
"""

import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from samo.errors import ConfigError, nearest
from samo.train.config import VERSION, TrainConfig

__all__ = []

Config = TypeVar("Config", bound=TrainConfig)


def read_toml(path: Path) -> TrainConfig:
    """Read settings from a TOML file; paths in it are relative to the file's folder."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config '{path}': {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the config '{path}' is not valid TOML: {error}") from None
    return from_dict(TrainConfig, content, source=f"the config '{path}'", folder=path.parent)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Return the settings as nested dictionaries of JSON's types.

    Example:
        >>> from samo.train.config import TrainConfig
        >>> from samo.train.config_io import from_dict, to_dict
        >>> from_dict(TrainConfig, to_dict(TrainConfig()), source="a copy") == TrainConfig()
        True
    """
    return {"version": VERSION, **_plain(config)}


def from_dict(
    kind: type[Config], content: Any, *, source: str, folder: Path | None = None
) -> Config:
    """Build settings from nested dictionaries, as `to_dict` returns them or a file holds them.

    Args:
        kind: `TrainConfig` or `ResolvedConfig`.
        content: Section name to settings, and ``version``.
        source: Name of the source in errors.
        folder: Where relative paths start; None leaves them as they are.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{source} holds {type(content).__name__}, not sections of settings")
    version = content.get("version", VERSION)
    if version != VERSION:
        raise ConfigError(
            f"{source} has version {version!r}, and this samo reads version {VERSION}; use the samo it was "
            "written for, or write it again (samo train --help lists all settings)"
        )
    sections: dict[str, Any] = {}
    kinds = typing.get_type_hints(kind)
    for name, values in content.items():
        if name == "version":
            continue
        if name not in kinds:
            homes = [key for key, hint in kinds.items() if name in typing.get_type_hints(hint)]
            home = f"; it belongs under [{homes[0]}]" if homes else ""
            raise ConfigError(f"{source} has an unknown key '{name}'{nearest(name, kinds)}{home}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: '{name}' is a section, [{name}], and got {values!r}")
        hints = typing.get_type_hints(kinds[name])
        for key, value in values.items():
            if key not in hints:
                raise ConfigError(
                    f"{source} has an unknown key '{name}.{key}'{nearest(key, hints)}"
                )
            sections.setdefault(name, {})[key] = _checked(
                hints[key], value, f"{source}: '{name}.{key}'", folder
            )
    try:
        return kind(**{name: kinds[name](**values) for name, values in sections.items()})
    except TypeError as error:  # a record without all of its settings
        raise ConfigError(f"{source} is incomplete: {error}") from None


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _checked(hint: Any, value: Any, what: str, folder: Path | None) -> Any:
    try:
        return _convert(hint, value, folder)
    except (TypeError, ValueError, RuntimeError):  # the last: "~name" of an unknown user
        raise ConfigError(f"{what} takes {_describe(hint)}, got {value!r}") from None


def _convert(hint: Any, value: Any, folder: Path | None) -> Any:
    """Return the value as the type hint asks for it, or raise TypeError or ValueError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for choice in arguments:
            try:
                return _convert(choice, value, folder)
            except (TypeError, ValueError):
                continue
        raise TypeError
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]  # one file, one pattern
        kinds = [arguments[0]] * len(items) if arguments[-1] is Ellipsis else arguments
        return tuple(_convert(kind, item, folder) for kind, item in zip(kinds, items, strict=True))
    if origin is dict:
        return {
            _convert(arguments[0], key, folder): _convert(arguments[1], item, folder)
            for key, item in dict(value).items()
        }
    if hint is Path:
        path = Path(value)
        return path if folder is None else folder / path.expanduser()
    if hint is float and type(value) is int:
        return float(value)
    is_choice = origin is Literal and value in arguments and not isinstance(value, bool)
    if is_choice or type(value) is hint:  # type(): True is an int for isinstance
        return value
    raise TypeError


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in arguments if choice is not type(None))
    if origin is Literal:
        listed = ", ".join(map(repr, arguments))
        return f"one of {listed}" if len(arguments) > 1 else listed
    if origin is tuple:
        return f"a list of {_describe(arguments[0]).removeprefix('a ')}s"
    if origin is dict:
        return "a table of patterns and numbers"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(hint, "a path")
