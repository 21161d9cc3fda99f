"""Settings in files: the TOML that a user writes, the JSON that a run records. Imports no torch.

A file may leave out settings, but an unknown key is an error that names the nearest one.
"""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from samo.errors import ConfigError, nearest
from samo.train.config import TrainConfig
from samo.train.typed import typed

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
    """Return the settings as nested dictionaries of JSON's types."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return plain


def from_dict(
    kind: type[Config], content: Any, *, source: str, folder: Path | None = None
) -> Config:
    """Build settings from nested dictionaries, as `to_dict` returns them or a file holds them.

    Args:
        kind: `TrainConfig` or `ResolvedConfig`.
        content: Section name to settings.
        source: Name of the source in errors.
        folder: Where relative paths start; None leaves them as they are.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{source} holds {type(content).__name__}, not sections of settings")
    kinds, sections = get_type_hints(kind), {}
    for name, values in content.items():
        if name not in kinds:
            homes = [key for key, hint in kinds.items() if name in get_type_hints(hint)]
            home = f"; it belongs under [{homes[0]}]" if homes else ""
            raise ConfigError(f"{source} has an unknown key '{name}'{nearest(name, kinds)}{home}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: '{name}' is a section, [{name}], and got {values!r}")
        hints, section = get_type_hints(kinds[name]), {}
        for key, value in values.items():
            if key not in hints:
                close = nearest(key, hints)
                raise ConfigError(f"{source} has an unknown key '{name}.{key}'{close}")
            try:
                section[key] = typed(value, hints[key], folder)
            except (TypeError, ValueError, RuntimeError):  # the last: "~name" of an unknown user
                takes = _name(hints[key])
                raise ConfigError(
                    f"{source}: '{name}.{key}' takes {takes}, got {value!r}"
                ) from None
        sections[name] = section
    try:
        return kind(**{name: kinds[name](**values) for name, values in sections.items()})
    except TypeError as error:  # a record without all of its settings
        raise ConfigError(f"{source} is incomplete: {error}") from None


def _name(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) else str(hint)
    return name.replace("typing.", "").replace("pathlib.", "")
