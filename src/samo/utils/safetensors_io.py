"""Safetensors files with deterministic bytes, written with one tensor in host memory at a time.

    8 bytes     length of the header
    header      {"name": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}, ...}, JSON
    tensors     one after the other

safetensors' own ``save`` holds each tensor twice more in memory, which takes 2.5 times as long, and
orders metadata at random. Its reader is used: it checks the header against the file's size.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor

DTYPES: Final = {
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
"""The types that safetensors can hold and torch can read back."""

DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

READ_ERRORS: Final = (SafetensorError, OSError, ValueError)
"""What a reader raises for a file that is missing, damaged or of another kind."""


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """Yield the bytes of a file: the header, then each tensor, copied to the host in turn.

    Wide types come first, so that every tensor is aligned; otherwise the order is the caller's.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        yield memoryview(host_bytes(tensors[name]).numpy())  # type: ignore[arg-type]


def host_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the host; shares memory with a contiguous CPU tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8)
