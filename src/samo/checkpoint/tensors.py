"""Tensors in the files of a checkpoint: of about 1 GB each, and, of FSDP2's DTensors, a rank's rows.

A file with rows 16 to 31 of a tensor of 64 has ``{"0.weight": [16, 64]}`` as the metadata ``rows``.
A reader puts the rows of all files together, or takes those it needs.
"""

import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

import torch
from safetensors import safe_open
from torch import Tensor, nn

from samo.checkpoint.manifest import Manifest, damaged
from samo.errors import CheckpointError
from samo.mask.mask import Mask
from samo.utils import atomic_io, safetensors_io

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = []

SHARD_BYTES = 10**9
"""A file takes tensors up to this size together; a larger tensor gets one of its own."""

_CHUNK_BYTES: Final = 2**24


# Rows of DTensors --------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of a tensor that a rank holds, and the ranks that together hold all of them."""

    start: int
    stop: int
    ranks: tuple[int, ...] = ()


def rows_of(tensor: Tensor) -> Rows | None:
    """Return which rows of a DTensor this rank holds; None for a tensor that it holds whole."""
    if not is_dtensor(tensor):
        return None
    axes = [i for i, placement in enumerate(tensor.placements) if placement.is_shard(0)]
    if not axes:
        return None
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert here is not None, "a rank outside the mesh cannot hold its tensors"
    index = tuple(slice(None) if i == axes[0] else at for i, at in enumerate(here))
    ranks: list[int] = mesh.mesh[index].tolist()
    # As torch.chunk cuts: the last ranks may hold fewer rows, or none.
    num_rows = tensor.shape[0]
    size = (num_rows + len(ranks) - 1) // len(ranks)
    start = min(here[axes[0]] * size, num_rows)
    return Rows(start, min(start + size, num_rows), tuple(ranks))


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; shares its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor sharded as ``like`` is; the tensor itself if that is not a DTensor."""
    rows = rows_of(like)
    return with_rows(whole if rows is None else whole[rows.start : rows.stop], like)


def with_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return a copy of this rank's rows as a DTensor like ``like``, on its device."""
    if not is_dtensor(like):
        return rows
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows.to(like.device, copy=True),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=torch.empty(like.shape, device="meta").stride(),
    )


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return False  # and the module of DTensor, which takes a second to load, stays out
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


# Writing -----------------------------------------------------------------------------------------


def check_plain(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that cannot be written.

    Raises:
        CheckpointError: It has no values, is not dense, or of a type or layout that no file holds.
    """
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        raise CheckpointError(f"'{name}' has no values yet; save the model once it has")
    is_plain = not hasattr(tensor, "__tensor_flatten__")
    if is_dtensor(tensor):
        cuts = [placement for placement in tensor.placements if not placement.is_replicate()]
        is_plain = len(cuts) <= 1 and all(cut.is_shard(0) for cut in cuts)
    if not is_plain or tensor.layout != torch.strided:
        raise CheckpointError(
            f"'{name}' is a {type(tensor).__name__} of layout {tensor.layout}; a checkpoint holds plain "
            "dense tensors and DTensors that are sharded by rows along one axis, and "
            "torch.distributed.checkpoint other ones"
        )
    if tensor.dtype not in safetensors_io.DTYPE_NAMES:
        raise CheckpointError(
            f"'{name}' is {tensor.dtype}, which no safetensors file holds; convert it before saving"
        )
    if name == "__metadata__":
        raise CheckpointError(
            "'__metadata__' is taken by the file format; give that tensor another name"
        )


def write_tensors(
    folder: Path,
    stem: str,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Callable[[list[str]], dict[str, str]] | None = None,
    on_file: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Write this rank's part of some tensors, one in host memory at a time.

    Args:
        folder: Where to write.
        stem: First part of the files' names.
        tensors: By name.
        metadata: Returns the metadata of a file with the tensors of these names.
        on_file: Called after each file.

    Returns:
        The manifest's entry of each file.
    """
    shards: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        size = local(tensor).nbytes
        if not shards or size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    files = {}
    for number, names in enumerate(shards, 1):
        part = f"-{number:05}" if len(shards) > 1 else ""
        file = f"{stem}{part}.safetensors"
        rows = {
            name: [found.start, tensors[name].shape[0]]
            for name in names
            if (found := rows_of(tensors[name])) is not None
        }
        more = ({} if metadata is None else metadata(names)) | (
            {"rows": json.dumps(rows)} if rows else {}
        )
        pieces = safetensors_io.encode({name: local(tensors[name]) for name in names}, more)
        files[file] = _write_file(folder / file, pieces)
        on_file()
    return files


def _write_file(file: Path, pieces: Iterator[memoryview]) -> dict[str, Any]:
    digest, num_bytes = hashlib.sha256(), 0

    def chunks() -> Iterator[memoryview]:
        nonlocal num_bytes
        for piece in pieces:
            num_bytes += len(piece)
            for start in range(0, len(piece), _CHUNK_BYTES):
                digest.update(piece[start : start + _CHUNK_BYTES])
                yield piece[start : start + _CHUNK_BYTES]
            del piece  # frees its memory before the next tensor is copied

    atomic_io.write_new(file, chunks())
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


# Reading -----------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Rows of a tensor in one file; a scalar is one row."""

    start: int
    stop: int
    file: Path


class Spec(NamedTuple):
    """Type and shape of a saved tensor, and where its rows are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class SavedTensors:
    """The tensors of one kind in a checkpoint.

    Raises:
        CheckpointError: A file cannot be read, or does not fit the others.
    """

    def __init__(self, path: Path, manifest: Manifest, kind: str) -> None:
        self.specs: Final[dict[str, Spec]] = {}
        self._open: Final[Any] = cache(partial(safe_open, framework="pt"))
        for file_name in manifest.files_of(kind):
            file = path / manifest.data / file_name
            with _reading(file):
                tensors = self._open(file)
                rows = json.loads((tensors.metadata() or {}).get("rows", "{}"))
                for name in tensors.keys():  # noqa: SIM118
                    self._add(name, tensors.get_slice(name), rows.get(name), file)
        for name, spec in self.specs.items():
            starts, stops, files = zip(*sorted(spec.parts))
            if starts != (0, *stops[:-1]) or stops[-1] != (spec.shape or (1,))[0]:
                raise damaged(
                    files[-1], f"its tensor '{name}' is there twice, or rows of it are missing"
                )

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Return a tensor, or some of its rows, perhaps mapped from the disk: copy it, do not keep it.

        Raises:
            CheckpointError: A file cannot be read.
        """
        spec = self.specs[name]
        if rows is None and len(spec.parts) == 1:
            with _reading(spec.parts[0].file):
                tensor: Tensor = self._open(spec.parts[0].file).get_tensor(name)
                return tensor
        first, last = (0, spec.shape[0]) if rows is None else rows[:2]
        found = torch.empty(last - first, *spec.shape[1:], dtype=spec.dtype)
        for part in spec.parts:
            start, stop = max(first, part.start), min(last, part.stop)
            if start < stop:
                with _reading(part.file):
                    tensors = self._open(part.file).get_slice(name)
                    found[start - first : stop - first] = tensors[
                        start - part.start : stop - part.start
                    ]
        return found

    def _add(self, name: str, header: Any, rows: list[int] | None, file: Path) -> None:
        dtype, shape = safetensors_io.DTYPES[header.get_dtype()], tuple(header.get_shape())
        num_rows = (shape or (1,))[0]
        start, total = map(operator.index, rows or (0, num_rows))
        part = Part(start, start + num_rows, file)
        whole = (total, *shape[1:]) if shape else ()
        known = self.specs.setdefault(name, Spec(dtype, whole, ()))
        if known[:2] != (dtype, whole):
            raise ValueError(f"its '{name}' is {dtype} {whole}, elsewhere {known[:2]}")
        if not (name.startswith(SETTING) and known.parts):
            self.specs[name] = known._replace(parts=(*known.parts, part))


SETTING: Final = "setting "
"""Prefix of tensors that are named by their bytes: several ranks may write the same one."""


_READ_ERRORS: Final = (AttributeError, KeyError, TypeError, RecursionError)
"""What metadata of a stranger raises."""


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (*_READ_ERRORS, *safetensors_io.READ_ERRORS) as error:
        raise damaged(file, f"it is not a safetensors file of a checkpoint ({error})") from error


class Checkpoint(NamedTuple):
    """An open checkpoint."""

    path: Path
    manifest: Manifest
    masks: Mapping[str, Mask]
    weights: SavedTensors
    moments: SavedTensors

    def misfit(self, what: str) -> CheckpointError:
        """Return the error for a checkpoint of something else."""
        return CheckpointError(f"'{self.path}' does not fit: {what}")
