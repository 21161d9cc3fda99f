"""Tensors in the files of a checkpoint. Of a DTensor of FSDP2, each rank writes its rows.

A file with rows 16 to 31 of a tensor of 64 has ``{"0.weight": [16, 64]}`` as the metadata ``rows``.
A reader puts the rows of all files together, or takes those it needs.
"""

import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samo.checkpoint.manifest import Manifest, damaged
from samo.core.shards import local_of
from samo.errors import CheckpointError
from samo.utils import atomic_io, safetensors_io, untrusted

_CHUNK_BYTES: Final = 2**24


class Rows(NamedTuple):
    """The rows of a tensor that a rank holds, and the ranks that together hold all of them."""

    start: int
    stop: int
    ranks: tuple[int, ...]


def rows_of(tensor: Tensor) -> Rows | None:
    """Return which rows of a DTensor this rank holds; None for a tensor that it holds whole."""
    if not isinstance(tensor, DTensor):
        return None
    axes = [i for i, placement in enumerate(tensor.placements) if placement.is_shard(0)]
    if not axes:
        return None
    mesh, num_rows = tensor.device_mesh, tensor.shape[0]
    ranks = dist.get_process_group_ranks(mesh.get_group(axes[0]))
    # As torch.chunk cuts: the last ranks may hold fewer rows, or none.
    start = min(mesh.get_local_rank(axes[0]) * math.ceil(num_rows / len(ranks)), num_rows)
    return Rows(start, start + local_of(tensor).shape[0], tuple(ranks))


def check_plain(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that no file can hold."""
    is_plain = tensor.layout == torch.strided and not hasattr(tensor, "__tensor_flatten__")
    if isinstance(tensor, DTensor):
        cuts = [placement for placement in tensor.placements if not placement.is_replicate()]
        is_plain = len(cuts) <= 1 and all(cut.is_shard(0) for cut in cuts)
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        problem = "has no values yet"
    elif not is_plain:
        problem = f"is a {type(tensor).__name__} ({tensor.layout}), not dense or sharded by rows"
    elif tensor.dtype not in safetensors_io.DTYPE_NAMES:
        problem = f"is {tensor.dtype}, which safetensors lacks"
    elif name == "__metadata__":
        problem = "is a name that safetensors reserves"
    else:
        return
    raise CheckpointError(f"a checkpoint cannot hold '{name}': it {problem}")


def name_tensors(tensors: dict[str, Tensor]) -> Callable[[Any, str], str | None]:
    """Return an ``encode_tensor`` for `json_values.encode` that adds each tensor, by its path."""

    def encode_tensor(value: Any, where: str) -> str | None:
        if not isinstance(value, Tensor):
            return None
        check_plain(where, value)
        while where in tensors:  # "a/b" of parameter "c" and "b" of parameter "c/a"
            where += "_"
        tensors[where] = value
        return where

    return encode_tensor


def rows_metadata(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the metadata that says which rows of tensors a file of this rank has."""
    rows = {
        name: [found.start, tensor.shape[0]]
        for name, tensor in tensors.items()
        if (found := rows_of(tensor)) is not None
    }
    return {"rows": json.dumps(rows)} if rows else {}


def write_tensors(
    file: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    on_chunk: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write tensors, one in host memory at a time; return the file's entry in the manifest."""
    digest, num_bytes = hashlib.sha256(), 0

    def chunks() -> Iterator[memoryview]:
        nonlocal num_bytes
        for piece in safetensors_io.encode(tensors, metadata):
            num_bytes += len(piece)
            for start in range(0, len(piece), _CHUNK_BYTES):
                digest.update(piece[start : start + _CHUNK_BYTES])
                yield piece[start : start + _CHUNK_BYTES]
                on_chunk()
            del piece  # frees its memory before the next tensor is copied

    atomic_io.write_new(file, chunks())
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


class Spec(NamedTuple):
    """Type and shape of a saved tensor, and its first row, last row and file for each part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, Path], ...] = ()


class SavedTensors:
    """The tensors of one kind in a checkpoint, put together from all its files."""

    def __init__(self, manifest: Manifest, kind: str) -> None:
        self.specs: Final[dict[str, Spec]] = {}
        self._open: Final[Any] = cache(partial(safe_open, framework="pt"))
        for file in manifest.files_of(kind):
            with _reading(file):
                tensors = self._open(file)
                metadata = tensors.metadata() or {}
                rows = untrusted.parse_json(metadata.get("rows", "{}").encode())
                for name in tensors.keys():  # noqa: SIM118
                    self._add(name, tensors.get_slice(name), rows.get(name), file)
        for name, spec in self.specs.items():
            starts, stops, files = zip(*sorted(spec.parts))
            if starts != (0, *stops[:-1]) or stops[-1] != (spec.shape or (1,))[0]:
                raise damaged(files[-1], f"rows of '{name}' are missing, or there twice")

    def _add(self, name: str, header: Any, rows: list[int] | None, file: Path) -> None:
        dtype, shape = safetensors_io.DTYPES[header.get_dtype()], tuple(header.get_shape())
        num_rows = (shape or (1,))[0]
        start, total = map(operator.index, rows or (0, num_rows))
        whole = (total, *shape[1:]) if shape else ()
        known = self.specs.get(name, Spec(dtype, whole))
        if known[:2] != (dtype, whole):
            raise ValueError(f"its '{name}' is {dtype} {whole}, in another file {known[:2]}")
        part = start, start + num_rows, file
        self.specs[name] = known._replace(parts=(*known.parts, part))

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Return a tensor or some of its rows, perhaps mapped from the disk: copy it before use."""
        spec = self.specs[name]
        if rows is None and len(spec.parts) == 1:
            ((_, _, file),) = spec.parts
            with _reading(file):
                tensor: Tensor = self._open(file).get_tensor(name)
                return tensor
        first, last = (0, spec.shape[0]) if rows is None else rows[:2]
        found = torch.empty(last - first, *spec.shape[1:], dtype=spec.dtype, device="cpu")
        for begin, end, file in spec.parts:
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                with _reading(file):
                    saved = self._open(file).get_slice(name)
                    found[start - first : stop - first] = saved[start - begin : stop - begin]
        return found


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (
        *safetensors_io.READ_ERRORS,
        *(AttributeError, KeyError, TypeError, RecursionError),  # of metadata of a stranger
    ) as error:
        raise damaged(file, f"it is not a safetensors file of a checkpoint ({error})") from error
