"""Settings in files: a TOML file that a person writes, the JSON that a run records. Imports no torch.

A file may say less than everything, but nothing that is unknown: a misspelt key is an error that
names the nearest one.
"""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from samo.errors import ConfigError, nearest
from samo.train.config import VERSION, TrainConfig

__all__ = []

Config = TypeVar("Config")


def read_toml(path: Path) -> TrainConfig:
    """Read settings from a TOML file; paths in it are relative to the file's folder.

    Raises:
        ConfigError: The file cannot be read, is of another version, or has an unknown key or a value
            of the wrong type.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config '{path}': {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the config '{path}' is not valid TOML: {error}") from None
    return from_dict(content, source=f"the config '{path}'", folder=path.parent)


def from_dict(content: Any, *, source: str, folder: Path | None = None) -> TrainConfig:
    """Build settings from nested dictionaries, as `to_dict` gives them or a file has them.

    Args:
        content: Section name to settings, and ``version``.
        source: What errors call it.
        folder: Where relative paths start; None leaves them as they are.

    Raises:
        ConfigError: Another version, an unknown key, or a value of the wrong type.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{source} holds {type(content).__name__}, not sections of settings")
    version = content.get("version", VERSION)
    if version != VERSION:
        raise ConfigError(
            f"{source} is of version {version!r}, and this samo reads version {VERSION}; use the samo "
            "it was written for, or write it anew (docs/cli.md lists all settings)"
        )
    sections = {key: value for key, value in content.items() if key != "version"}
    return _build(TrainConfig, sections, source, "", folder)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Return the settings as nested dictionaries of what JSON and TOML know.

    Example:
        >>> from samo.train.config import TrainConfig
        >>> from samo.train.config_files import from_dict, to_dict
        >>> from_dict(to_dict(TrainConfig()), source="a copy") == TrainConfig()
        True
    """
    return {"version": VERSION, **typing.cast(dict[str, Any], _plain(config))}


def changes(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ: section.key to (old, new).

    Example:
        >>> from samo.train.config import RunConfig, TrainConfig
        >>> from samo.train.config_files import changes
        >>> changes(TrainConfig(), TrainConfig(run=RunConfig(steps=5)))
        {'run.steps': (1000, 5)}
    """
    differing = {}
    for section in dataclasses.fields(TrainConfig):
        before, after = getattr(old, section.name), getattr(new, section.name)
        for entry in dataclasses.fields(before):
            pair = (getattr(before, entry.name), getattr(after, entry.name))
            if pair[0] != pair[1]:
                differing[f"{section.name}.{entry.name}"] = pair
    return differing


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _build(
    cls: type[Config], content: Mapping[str, Any], source: str, prefix: str, folder: Path | None
) -> Config:
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in content.items():
        if key not in hints:
            homes = _homes(key) if not prefix else ""
            raise ConfigError(
                f"{source} has an unknown key '{prefix}{key}'{nearest(key, hints)}{homes}"
            )
        values[key] = _convert(hints[key], value, source, f"{prefix}{key}", folder)
    return cls(**values)


def _homes(key: str) -> str:
    """Say which section a key belongs to that stands outside of all of them."""
    for section in dataclasses.fields(TrainConfig):
        if key in typing.get_type_hints(typing.cast(type, section.type)):
            return f"; it belongs under [{section.name}]"
    return ""


def _convert(hint: Any, value: Any, source: str, key: str, folder: Path | None) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{source}: '{key}' is a section, [{key}], and got the value {value!r}"
            )
        return _build(typing.cast(type[Any], hint), value, source, f"{key}.", folder)
    try:
        return _fit(hint, value, folder)
    except (TypeError, ValueError, RuntimeError):  # the last: a "~name" that nobody has
        raise ConfigError(f"{source}: '{key}' takes {_describe(hint)}, got {value!r}") from None


def _fit(hint: Any, value: Any, folder: Path | None) -> Any:
    """Return ``value`` as the type asks for it; raise TypeError or ValueError if it cannot be that."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for choice in arguments:
            try:
                return _fit(choice, value, folder)
            except (TypeError, ValueError):
                continue
        raise TypeError
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            raise ValueError
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            value = [value]  # one file, one pattern
        inner = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(inner) != len(value):
            raise ValueError
        return tuple(_fit(kind, item, folder) for kind, item in zip(inner, value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError
        return {
            _fit(arguments[0], k, folder): _fit(arguments[1], v, folder) for k, v in value.items()
        }
    if hint is Path:
        if not isinstance(value, (str, Path)):
            raise TypeError
        return Path(value) if folder is None else folder / Path(value).expanduser()
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool):
        if type(value) is not hint:
            raise TypeError
        return value
    if hint is type(None) and value is None:
        return None
    raise TypeError


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in arguments if choice is not type(None))
    if origin is Literal:
        return (
            "one of " + ", ".join(map(repr, arguments))
            if len(arguments) > 1
            else repr(arguments[0])
        )
    if origin is tuple:
        return f"a list of {_describe(arguments[0]).removeprefix('a ')}s"
    if origin is dict:
        return "a table of patterns and numbers"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(hint, "a path")
