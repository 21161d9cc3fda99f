"""The manifest of a checkpoint: everything but the tensors, as JSON with a checksum. Without torch.

    path/manifest.json              its last line is the SHA-256 of the lines above
    path/data-3f2a91c4/             the tensors; the manifest names the current folder
        weights.safetensors         what state_dict() has: values, unpruned parameters, buffers
        masks.safetensors           a mask file, of a compressed model
        optimizer.safetensors       "0.weight/exp_avg" and so on
        extra.safetensors           tensors of the caller

Each of several ranks writes its own files, such as ``weights-rank00002.safetensors``. A manifest
may come from a stranger: every value is checked before it is used.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from samo.checkpoint import json_values
from samo.errors import CheckpointError
from samo.utils import untrusted

NAME: Final = "manifest.json"
FORMAT: Final = "samo-checkpoint"
VERSION: Final = 3
KINDS: Final = ("weights", "masks", "optimizer", "extra")
MAX_BYTES: Final = 2**24
"""Largest manifest written or read, for about 40,000 tensors."""

DATA_FOLDER: Final = re.compile(r"data-[0-9a-f]{8}", re.ASCII)
DATA_FILE: Final = re.compile(rf"({'|'.join(KINDS)})(-rank\d{{5,9}})?\.safetensors", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint, without its tensors."""

    content: dict[str, Any] = field(repr=False)  # the JSON
    samo_version: str  # of the samo that wrote it
    time: datetime  # when it was written, in UTC
    data: Path  # the folder with the tensors
    files: dict[str, dict[str, Any]]  # the files in that folder, with "bytes" and "sha256"
    is_compressed: bool
    dtype: str  # compute dtype of most parameters, such as "bfloat16"
    num_params: int  # with pruned ones; tied ones count once
    kept: int  # parameters that are not pruned
    tied: dict[str, str]  # further names of tensors that are saved under another one
    optimizer: dict[str, Any] | None  # class, groups and state, as JSON
    scaler: dict[str, Any] | None
    extra: dict[str, Any]  # the caller's values; of a tensor, its name in the file

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file["bytes"] for file in self.files.values())

    def files_of(self, kind: str) -> list[Path]:
        """Return the paths of the files of one kind."""
        names = [name for name in sorted(self.files) if re.split("[-.]", name)[0] == kind]
        return [self.data / name for name in names]


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of a checkpoint, without its data files and without torch.

    Raises:
        CheckpointError: There is no checkpoint, its manifest is damaged, or of another version.
    """
    path = Path(path)
    file = path / NAME
    try:
        data = untrusted.read_file(file, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        reason = f"there is no '{NAME}' in it" if path.exists() else "it does not exist"
        raise CheckpointError(
            f"'{path}' is not a checkpoint: {reason}; write one with samo.save(path, model, opt)"
        ) from None
    except OSError as error:
        raise CheckpointError(f"'{file}' cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise damaged(file, str(error)) from None
    if data != _with_checksum(data.rpartition(_CHECKSUM)[0]):
        raise damaged(file, "it does not match its checksum, or samo did not write it")
    try:
        content = untrusted.parse_json(data)
        _check(content, {"format": re.compile(FORMAT), "version": int})
        if content["version"] == VERSION:
            return _parse(path, content)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:100]
        raise damaged(file, f"its contents are not valid ({reason})") from None
    raise CheckpointError(
        f"'{file}' has version {content['version']}, this samo reads version {VERSION}; update samo"
    )


def encode_manifest(content: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest: a line for each key, and a checksum."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in content.items()
        if key != "checksum"
    ]
    data = _with_checksum(("{\n" + ",\n".join(lines)).encode("ascii"))
    for size, limit, unit in (
        (len(data), MAX_BYTES, "bytes"),
        (untrusted.num_values(data), untrusted.MAX_VALUES, "values"),
    ):
        if size > limit:
            raise ValueError(
                f"the manifest would have {size:,} {unit}, the limit is {limit:,}; give long lists "
                "in extra as tensors"
            )
    return data


_CHECKSUM: Final = b',\n"checksum": '


def _with_checksum(head: bytes) -> bytes:
    digest = hashlib.sha256(head).hexdigest()
    return head + _CHECKSUM + f'"{digest}"\n}}\n'.encode()


def damaged(file: Path, what: str) -> CheckpointError:
    """Return the error for a file that is not as it was written."""
    return CheckpointError(f"'{file}' is damaged: {what}; use another copy of the checkpoint")


# Checking ----------------------------------------------------------------------------------------


def _check(value: Any, schema: Any) -> None:
    """Raise KeyError, TypeError or ValueError unless JSON fits a schema.

    A schema is a type, a range, a pattern, a function that raises, ``[item]`` for a list,
    ``(key, item)`` for any dict, or ``{"key": schema}`` for a dict with these keys.
    """
    kinds = {list: list, tuple: dict, dict: dict, range: int, re.Pattern: str, type: schema}
    if type(schema) not in kinds:
        schema(value)
    elif type(value) is not kinds[type(schema)]:  # True is not 1 here
        raise TypeError(f"{value!r} where {schema} was expected")
    elif isinstance(schema, list):
        for item in value:
            _check(item, schema[0])
    elif isinstance(schema, tuple):
        for key, item in value.items():
            _check(key, schema[0])
            _check(item, schema[1])
    elif isinstance(schema, dict):
        for key, item in schema.items():
            _check(value[key], item)
    elif isinstance(schema, re.Pattern) and not schema.fullmatch(value):
        raise ValueError(f"{value!r} is not allowed")
    elif isinstance(schema, range) and value not in schema:
        raise ValueError(f"{value} is out of range")


def _or_none(schema: Any) -> Callable[[Any], None]:
    return lambda value: _check(value, type(None) if value is None else schema)


def _values(tensor: type) -> Callable[[Any], None]:
    """Return a check for encoded dicts, whose tensors are JSON of this type."""
    return lambda value: _check(json_values.decode(value, lambda t: _check(t, tensor)), dict)


def _amount(value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < 2**127:
        raise ValueError(f"{value!r} where an amount was expected")


_COUNT: Final = range(2**63)
_MODEL: Final = {
    "is_compressed": bool,
    "dtype": str,
    "num_params": _COUNT,
    "kept": _COUNT,
    "tied": (str, str),
}
_OPTIMIZER: Final = {
    "class": str,
    "groups": [{"names": [str], "settings": _values(list)}],
    "state": (str, _values(str)),
    "more": _values(list),
}
_SCHEMA: Final = {
    "samo": str,
    "time": datetime.fromisoformat,
    "data": DATA_FOLDER,
    "files": (DATA_FILE, {"bytes": _COUNT, "sha256": re.compile("[0-9a-f]{64}")}),
    "model": _MODEL,
    "optimizer": _or_none(_OPTIMIZER),
    "scaler": _or_none((str, _amount)),
    "extra": _values(str),
}


def _parse(path: Path, content: dict[str, Any]) -> Manifest:
    _check(content, _SCHEMA)
    return Manifest(
        content=content,
        samo_version=content["samo"],
        time=datetime.fromisoformat(content["time"]).astimezone(UTC),
        data=path / content["data"],
        extra=json_values.decode(content["extra"]),
        **{key: content[key] for key in ("files", "optimizer", "scaler")},
        **{key: content["model"][key] for key in _MODEL},
    )
