"""The manifest: what a checkpoint folder holds, checked to the last byte, and read without torch.

    path/manifest.json              format, version, files with bytes and SHA-256, everything that is
                                    no tensor, and a checksum of itself
    path/data-3f2a91c4/             the tensors; the manifest says which such folder counts
        weights.safetensors         what state_dict() has: values, unpruned parameters, buffers
        masks.safetensors           a mask file, of a compressed model
        optimizer.safetensors       "0.weight/exp_avg" and so on
        extra.safetensors           tensors of the caller

What grows past 1 GB becomes ``weights-00001-of-00003.safetensors`` and so on. The bytes of a manifest
are canonical: whatever was read is written again and compared, so that no byte of it can change
unseen. Nothing in it is believed before its type is checked: it may come from a stranger.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from samo.checkpoint import values
from samo.errors import CheckpointError

__all__ = ["DataFile", "Manifest", "read_manifest"]

NAME: Final = "manifest.json"
FORMAT: Final = "samo-checkpoint"
VERSION: Final = 2
KINDS: Final = ("weights", "masks", "optimizer", "extra")

MAX_BYTES: Final = 2**26
"""Largest manifest that is written or read: a stranger's could fill all memory."""

DATA_FOLDER: Final = re.compile(r"data-[0-9a-f]{8}", re.ASCII)
DATA_FILE: Final = re.compile(
    rf"(?P<kind>{'|'.join(KINDS)})(-\d{{5}}-of-\d{{5}})?\.safetensors", re.ASCII
)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """What the manifest says of one file in the data folder."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds, tensors aside.

    Example:
        >>> import tempfile, torch, samo
        >>> from samo.checkpoint import read_manifest
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> model = samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samo.save(folder, model, extra={"step": 7})
        ...     manifest = read_manifest(folder)
        >>> manifest.kept, manifest.num_params, manifest.dtype, manifest.extra
        (40, 72, 'bfloat16', {'step': 7})
    """

    version: int
    """Of the format."""
    samo_version: str
    """That wrote it."""
    time: datetime
    """When it was written, in UTC."""
    data: str
    """Name of the folder with the tensors, beside the manifest."""
    files: dict[str, DataFile]
    """The files in that folder."""
    is_compressed: bool
    """Whether the model was compressed, or an ordinary one."""
    dtype: str
    """Type that most of its parameters are computed with, such as ``"bfloat16"``."""
    num_params: int
    """Parameters of the model, pruned ones included, tied ones once."""
    kept: int
    """Those of them that are not pruned."""
    tied: dict[str, str]
    """Further names of tensors that are saved under another one."""
    optimizers: tuple[dict[str, Any], ...]
    """Class, groups and state of each optimizer that was saved, encoded (see ``values.py``)."""
    scaler: dict[str, Any] | None
    """State of the loss scaler, if one was saved."""
    extra: dict[str, Any]
    """What the caller added, tensors aside."""
    extra_tensors: tuple[str, ...]
    """Names of the tensors that the caller added."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.num_bytes for file in self.files.values())

    def files_of(self, kind: str) -> dict[str, DataFile]:
        """Return the files of one kind, in order.

        Example:
            >>> import tempfile, torch, samo
            >>> from samo.checkpoint import read_manifest
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     samo.save(folder, torch.nn.Linear(2, 2))
            ...     list(read_manifest(folder).files_of("weights"))
            ['weights.safetensors']
        """
        return {name: file for name, file in sorted(self.files.items()) if kind_of(name) == kind}


def kind_of(name: str) -> str:
    """Return what kind of tensors a data file holds, from its name."""
    match = DATA_FILE.fullmatch(name)
    assert match is not None
    return match["kind"]


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of a checkpoint; its data files are not looked at, nor is torch loaded.

    Example:
        >>> import tempfile, torch, samo
        >>> from samo.checkpoint import read_manifest
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samo.save(folder, torch.nn.Linear(8, 8))
        ...     read_manifest(folder).num_params
        72

    Raises:
        CheckpointError: There is no checkpoint, its manifest is damaged, or of another version.
    """
    return parse(read_content(path), Path(path) / NAME)


def parse(content: dict[str, Any], file: Path) -> Manifest:
    """Check what a manifest says, and return it.

    Raises:
        CheckpointError: It is of another version, or makes no sense.
    """
    if content["version"] != VERSION:
        raise CheckpointError(
            f"'{file}' has version {content['version']}, this samo reads version {VERSION}; update samo"
        )
    try:
        return _manifest(content)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged(file, f"its contents make no sense ({_short(error)})") from None


def read_content(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a manifest of any version says, if its checksum is right.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = Path(path)
    file = path / NAME
    if not file.is_file():
        what = (
            f"there is no '{file}'"
            if path.is_dir()
            else "it is no folder"
            if path.exists()
            else "it does not exist"
        )
        raise CheckpointError(
            f"'{path}' is not a checkpoint: {what}; write one with samo.save(path, model, opt)"
        )
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise unreadable(file, error) from error
    if len(data) > MAX_BYTES:
        raise damaged(file, f"it has more than {MAX_BYTES:,} bytes")
    try:
        content = json.loads(data)
        is_canonical = isinstance(content, dict) and _canonical(content) == data
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"it is no JSON ({_short(error)})") from None
    if not is_canonical or content.get("format") != FORMAT:
        raise damaged(file, f"it was not written by samo, or changed since (no {FORMAT!r})")
    without = {key: value for key, value in content.items() if key != "checksum"}
    if content.get("checksum") != _checksum(without) or type(content.get("version")) is not int:
        raise damaged(file, "it does not match its own checksum")
    return content


def encode_manifest(content: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest with these contents and their checksum.

    Raises:
        ValueError: They are too many.
    """
    content = {key: value for key, value in content.items() if key != "checksum"}
    data = _canonical({**content, "checksum": _checksum(content)})
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"the manifest would have {len(data):,} bytes, at most {MAX_BYTES:,} are allowed; give "
            "long lists in extra as tensors"
        )
    return data


def describe_files(files: dict[str, DataFile]) -> dict[str, Any]:
    """Return the entry of some files in a manifest."""
    return {name: {"bytes": f.num_bytes, "sha256": f.sha256} for name, f in files.items()}


def damaged(file: Path, what: str) -> CheckpointError:
    """Return the error for a file that is not what was written."""
    return CheckpointError(f"'{file}' is damaged: {what}; take another copy of the checkpoint")


def unreadable(file: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that the system does not give."""
    return CheckpointError(
        f"'{file}' cannot be read: {error.strerror or error}; look at its permissions and at the disk"
    )


def _canonical(content: dict[str, Any]) -> bytes:
    """Return the only bytes that stand for these contents: JSON, a line for each of its parts."""
    lines = [f"{_json(key)}: {_json(value)}" for key, value in content.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=True)


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:100]


def _manifest(content: dict[str, Any]) -> Manifest:
    model = _typed(content["model"], dict)
    time = datetime.fromisoformat(_typed(content["time"], str))
    scaler = content["scaler"]
    extra = _typed(content["extra"], dict)
    tensors: list[str] = []
    json_values = {}
    for name, value in extra.items():
        if isinstance(value, dict) and set(value) == {"$tensor"}:
            tensors.append(_typed(value["$tensor"], str))
        else:
            json_values[name] = value
    return Manifest(
        version=content["version"],
        samo_version=_typed(content["samo"], str),
        time=time.astimezone(UTC),
        data=_matching(content["data"], DATA_FOLDER),
        files=dict(map(_file, _typed(content["files"], dict).items())),
        is_compressed=_typed(model["is_compressed"], bool),
        dtype=_typed(model["dtype"], str),
        num_params=_count(model["num_params"]),
        kept=_count(model["kept"]),
        tied=_strings(model["tied"]),
        optimizers=tuple(map(_optimizer, _typed(content["optimizers"], list))),
        scaler=None if scaler is None else _decoded(scaler),
        extra=_decoded(json_values),
        extra_tensors=tuple(tensors),
    )


def _file(item: tuple[str, Any]) -> tuple[str, DataFile]:
    name, entry = item
    return _matching(name, DATA_FILE), DataFile(
        num_bytes=_count(entry["bytes"]), sha256=_matching(entry["sha256"], _DIGEST)
    )


def _optimizer(value: Any) -> dict[str, Any]:
    optimizer: dict[str, Any] = _typed(value, dict)
    _typed(optimizer["class"], str)
    _decoded(optimizer["more"])
    for group in _typed(optimizer["groups"], list):
        _all_strings(_typed(group["names"], list))
        _decoded(group["settings"])
    for state in _typed(optimizer["state"], dict).values():
        _decoded(state)
    return optimizer


def _decoded(value: Any) -> dict[str, Any]:
    """Return what an encoded dict stands for, which for the caller's keys includes ``$x``."""
    decoded: dict[str, Any] = _typed(values.decode(_typed(value, dict)), dict)
    return decoded


def _strings(value: Any) -> dict[str, str]:
    found: dict[str, str] = _typed(value, dict)
    _all_strings(found.values())
    return found


def _all_strings(found: Iterable[Any]) -> None:
    for value in found:
        _typed(value, str)


def _count(value: Any) -> int:
    number: int = _typed(value, int)
    if not 0 <= number < 2**63:
        raise ValueError("a count out of range")
    return number


def _matching(value: Any, pattern: re.Pattern[str]) -> str:
    text: str = _typed(value, str)
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r} is not allowed there")
    return text


def _typed(value: Any, kind: type) -> Any:
    """Return the value if it is exactly of this type; True is not 1 here."""
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value
