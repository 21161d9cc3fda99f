"""The manifest of a checkpoint: what the folder holds, checked to the last byte, and read without torch.

    path/manifest.json              format, version, files with bytes and SHA-256, everything that is
                                    not a tensor, and, in the last line, a checksum of all lines
                                    above
    path/data-3f2a91c4/             the tensors; the manifest names the folder that counts
        weights.safetensors         what state_dict() has: values, unpruned parameters, buffers
        masks.safetensors           a mask file, of a compressed model
        optimizer.safetensors       "0.weight/exp_avg" and so on
        extra.safetensors           tensors of the caller

A kind of tensors over 1 GB is split into ``weights-00001.safetensors``,
``weights-00002.safetensors`` and so on; rank 3 of several writes ``weights-rank00003.safetensors``.
A manifest may come from a stranger: every value has its type checked before it is used.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from samo.checkpoint import json_values
from samo.errors import CheckpointError

__all__ = ["DataFile", "Manifest", "read_manifest"]

NAME: Final = "manifest.json"
FORMAT: Final = "samo-checkpoint"
VERSION: Final = 3
KINDS: Final = ("weights", "masks", "optimizer", "extra")

MAX_BYTES: Final = 2**26
"""Largest manifest that is written or read: a stranger's could fill all memory."""

DATA_FOLDER: Final = re.compile(r"data-[0-9a-f]{8}", re.ASCII)
DATA_FILE: Final = re.compile(
    rf"({'|'.join(KINDS)})(-rank\d{{5,9}})?(-\d{{5}})?\.safetensors", re.ASCII
)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """The manifest's entry of one file in the data folder."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of a checkpoint, tensors aside.

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

    version: int  # of the format
    samo_version: str  # of the samo that wrote it
    time: datetime  # when it was written, in UTC
    data: str  # name of the folder with the tensors, beside the manifest
    files: dict[str, DataFile]  # the files in that folder
    is_compressed: bool
    dtype: str  # that most parameters are computed with, such as "bfloat16"
    num_params: int  # pruned ones included, tied ones once
    kept: int  # parameters that are not pruned
    tied: dict[str, str]  # further names of tensors that are saved under another one
    optimizers: tuple[dict[str, Any], ...]  # class, groups and state of each, see json_values.py
    scaler: dict[str, Any] | None  # state of the loss scaler, if one was saved
    extra: dict[str, Any]  # the caller's values, tensors aside
    extra_tensors: tuple[str, ...]  # names of the caller's tensors

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
        return {
            name: file
            for name, file in sorted(self.files.items())
            if re.split("[-.]", name)[0] == kind
        }


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of a checkpoint, without its data files and without torch.

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


def read_content(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON of a manifest of any version, if its checksum is right.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = Path(path)
    file = path / NAME
    if not file.is_file():
        reason = "it does not exist"
        if path.exists():
            reason = f"there is no '{file}'" if path.is_dir() else "it is not a folder"
        raise CheckpointError(
            f"'{path}' is not a checkpoint: {reason}; write one with samo.save(path, model, opt)"
        )
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise unreadable(file, error) from error
    if len(data) > MAX_BYTES:
        raise damaged(file, f"it has more than {MAX_BYTES:,} bytes")
    head = data.rpartition(_CHECKSUM)[0]
    if data != _with_checksum(head):
        raise damaged(file, "it does not match its checksum, or samo did not write it")
    try:
        content = json.loads(data)
        if content["format"] != FORMAT or type(content["version"]) is not int:
            raise ValueError(f"not a {FORMAT}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(file, f"its contents make no sense ({_short(error)})") from None
    return dict(content)


def encode_manifest(content: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest: a line for each key, and a checksum.

    Raises:
        ValueError: It is too large.
    """
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in content.items()
        if key != "checksum"
    ]
    data = _with_checksum(("{\n" + ",\n".join(lines)).encode("ascii"))
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"the manifest would have {len(data):,} bytes, at most {MAX_BYTES:,} are allowed; give "
            "long lists in extra as tensors"
        )
    return data


_CHECKSUM: Final = b',\n"checksum": '


def _with_checksum(head: bytes) -> bytes:
    digest = hashlib.sha256(head).hexdigest()
    return head + _CHECKSUM + f'"{digest}"\n}}\n'.encode()


def damaged(file: Path, what: str) -> CheckpointError:
    """Return the error for a file that is not what was written."""
    return CheckpointError(f"'{file}' is damaged: {what}; take another copy of the checkpoint")


def unreadable(file: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that the system does not let us read."""
    return CheckpointError(
        f"'{file}' cannot be read: {error.strerror or error}; check its permissions and the disk"
    )


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:100]


# From JSON to Manifest ---------------------------------------------------------------------------


def parse(content: dict[str, Any], file: Path) -> Manifest:
    """Check the type of everything in a manifest, and return it.

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


def _manifest(content: dict[str, Any]) -> Manifest:
    model = _typed(content["model"], dict)
    scaler = content["scaler"]
    tensors: dict[str, str] = {}
    others = {}
    for name, value in _typed(content["extra"], dict).items():
        if isinstance(value, dict) and set(value) == {"$tensor"}:
            tensors[name] = _typed(value["$tensor"], str)
        else:
            others[name] = value
    files = {
        _matching(name, DATA_FILE): DataFile(
            num_bytes=_count(entry["bytes"]), sha256=_matching(entry["sha256"], _DIGEST)
        )
        for name, entry in _typed(content["files"], dict).items()
    }
    return Manifest(
        version=content["version"],
        samo_version=_typed(content["samo"], str),
        time=datetime.fromisoformat(_typed(content["time"], str)).astimezone(UTC),
        data=_matching(content["data"], DATA_FOLDER),
        files=files,
        is_compressed=_typed(model["is_compressed"], bool),
        dtype=_typed(model["dtype"], str),
        num_params=_count(model["num_params"]),
        kept=_count(model["kept"]),
        tied={alias: _typed(name, str) for alias, name in _typed(model["tied"], dict).items()},
        optimizers=tuple(_optimizer(entry) for entry in _typed(content["optimizers"], list)),
        scaler=None if scaler is None else _decoded(scaler),
        extra=_decoded(others),
        extra_tensors=tuple(tensors.values()),
    )


def _optimizer(value: Any) -> dict[str, Any]:
    optimizer: dict[str, Any] = _typed(value, dict)
    _typed(optimizer["class"], str)
    _decoded(optimizer["more"])
    for group in _typed(optimizer["groups"], list):
        for name in _typed(group["names"], list):
            _typed(name, str)
        _decoded(group["settings"])
    for state in _typed(optimizer["state"], dict).values():
        _decoded(state)
    return optimizer


def _decoded(value: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = _typed(json_values.decode(_typed(value, dict)), dict)
    return decoded


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
