"""Tensors in safetensors files of about 1 GB, one tensor in host memory at a time.

    8 bytes     length of the header
    header      {"name": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}, ...}, JSON
    tensors     one after the other

Files are written here, since safetensors' own ``save`` holds each twice more in memory (5 s against 2 s
for the 0.54 GB of a dense GPT and its AdamW on two busy cores, 2026-11-15), and read by safetensors.
"""

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from samo.checkpoint.manifest import DataFile, Manifest, damaged
from samo.checkpoint.rows import Piece, is_in_rows, own_part, pieces_of
from samo.errors import CheckpointError
from samo.utils import atomic_io

__all__ = []

SHARD_BYTES = 10**9
"""A file takes tensors up to this size together; a larger tensor gets one of its own."""

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls the types that it can hold and torch can read back."""
_DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}

_CHUNK_BYTES: Final = 2**24


class Source(NamedTuple):
    """A tensor to be written, made when its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    """Gives all of it, or this rank's rows."""
    pieces: tuple[Piece, ...] = ()
    """Who has which rows, where they lie on several ranks."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Spec(NamedTuple):
    """What a file says of a tensor in it."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def source_of(name: str, tensor: Tensor) -> Source:
    """Return a tensor as one to be written.

    Raises:
        CheckpointError: It has no values, is no plain dense tensor, or of a type that no file holds.
    """
    check_plain(name, tensor)
    pieces = pieces_of(tensor)
    return Source(tensor.dtype, tuple(tensor.shape), lambda: own_part(tensor), pieces)


def check_plain(name: str, tensor: Tensor) -> None:
    """Refuse what cannot be written."""
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        raise CheckpointError(f"'{name}' has no values yet; save the model once it has")
    is_plain = not hasattr(tensor, "__tensor_flatten__") or is_in_rows(tensor)
    if not is_plain or tensor.layout != torch.strided:
        raise CheckpointError(
            f"'{name}' is a {type(tensor).__name__} of layout {tensor.layout}; a checkpoint holds plain "
            "dense tensors and DTensors that are cut into rows along one axis, and "
            "torch.distributed.checkpoint other ones"
        )
    if tensor.dtype not in _DTYPE_NAMES:
        raise CheckpointError(
            f"'{name}' is {tensor.dtype}, which no safetensors file holds; convert it before saving"
        )


def write_shards(
    folder: Path,
    kind: str,
    sizes: Mapping[str, int],
    encode: Callable[[list[str]], Iterable[bytes | memoryview]],
) -> dict[str, DataFile]:
    """Write the tensors of one kind, and return what the manifest has to say of the files.

    Args:
        folder: Where to.
        kind: First part of the files' names.
        sizes: Bytes of each tensor.
        encode: Returns a file with the tensors of these names, piece by piece.
    """
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    files = {}
    for number, names in enumerate(shards, 1):
        part = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = f"{kind}{part}.safetensors"
        files[file] = _write_file(folder / file, encode(names))
    return files


def write_tensors(folder: Path, kind: str, sources: Mapping[str, Source]) -> dict[str, DataFile]:
    """Write tensors as they come, each made, and brought to the host, when its turn comes.

    Raises:
        CheckpointError: A name means something else in safetensors files.
    """
    if "__metadata__" in sources:
        raise CheckpointError(
            "'__metadata__' is taken by the file format; call that tensor something else"
        )

    def encode(names: list[str]) -> Iterator[bytes | memoryview]:
        # Wide types first: then every tensor is aligned, as safetensors has it.
        names = sorted(names, key=lambda name: -sources[name].dtype.itemsize)
        yield _header({name: sources[name] for name in names})
        for name in names:
            yield _bytes_of(sources[name].make())

    sizes = {name: source.num_bytes for name, source in sources.items()}
    return write_shards(folder, kind, sizes, encode)


def _header(sources: Mapping[str, Source]) -> bytes:
    entries, end = {}, 0
    for name, source in sources.items():
        begin, end = end, end + source.num_bytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[source.dtype],
            "shape": source.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(entries).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def host_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: its own where it is on the host and contiguous, else a copy's."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(host_bytes(tensor).numpy())  # type: ignore[arg-type]


def dtype_name(dtype: torch.dtype) -> str:
    """Return what safetensors calls a type."""
    return _DTYPE_NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """Return the type that safetensors calls so."""
    return _DTYPES[name]


def _write_file(file: Path, pieces: Iterable[bytes | memoryview]) -> DataFile:
    digest, num_bytes = hashlib.sha256(), 0

    def chunks() -> Iterator[memoryview]:
        nonlocal num_bytes
        for piece in pieces:
            view = memoryview(piece)
            num_bytes += len(view)
            for start in range(0, len(view), _CHUNK_BYTES):
                digest.update(view[start : start + _CHUNK_BYTES])
                yield view[start : start + _CHUNK_BYTES]
            del piece, view  # so that its memory is free before the next tensor is made

    atomic_io.write_new(file, chunks())
    return DataFile(num_bytes=num_bytes, sha256=digest.hexdigest())


class Shards:
    """The tensors of one kind in a checkpoint whose files are known to be as they were written."""

    def __init__(self, path: Path, manifest: Manifest, kind: str) -> None:
        self.files: Final = [path / manifest.data / name for name in manifest.files_of(kind)]
        self.specs: Final[dict[str, Spec]] = {}
        for file in self.files:
            self._read_header(file)

    def read(self, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, all or those named, shard by shard, mapped from the disk: to be copied, not kept.

        Raises:
            CheckpointError: A file cannot be read.
        """
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118
                        if names is None or name in names:
                            yield name, tensors.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise damaged(file, f"it is no safetensors file ({error})") from error

    def _read_header(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    header = tensors.get_slice(name)
                    dtype = _DTYPES.get(header.get_dtype())
                    if dtype is None or name in self.specs:
                        raise damaged(
                            file, f"its tensor '{name}' is there twice or of no known type"
                        )
                    self.specs[name] = Spec(file, dtype, tuple(header.get_shape()))
        except (SafetensorError, OSError, ValueError) as error:
            raise damaged(file, f"it is no safetensors file ({error})") from error
