"""Packets between stages, and the header that announces one.

A packet travels as a header of fixed size, then its tensors, one message each:

    | uint32 length | {"kind": "activation", "tensors": [["float32", [8, 16]]], ...} | 0 ... |

A receiver can wait for a header without knowing what comes; the JSON in it says which tensors
follow. Order alone identifies packets: no tags are needed, which NCCL does not have.
"""

import json
import struct
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

__all__ = ["HEADER_BYTES", "Packet", "PacketKind", "decode", "encode"]

PacketKind = Literal["activation", "gradient", "loss", "probe", "alive", "abort", "end"]
HEADER_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("<I")
_MAX_REASON: Final = 1000

TensorSpec = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Packet:
    """A message with its tensors, of the ``step``-th batch."""

    kind: PacketKind
    step: int
    micro_batch: int = -1
    stage: int = -1  # the one that receives the data or, for "abort", that failed
    tensors: tuple[Tensor, ...] = ()
    needs_grad: tuple[bool, ...] = ()  # for each activation, whether to send its gradient back
    reason: str = ""  # for "abort", how the stage failed
    is_training: bool = True  # whether the batch has a backward pass
    seed: int | None = None  # of what layers draw for this micro-batch


def encode(packet: Packet, sequence: int) -> Tensor:
    """Return the header of the ``sequence``-th packet of a link."""
    fields = vars(packet) | {
        "sequence": sequence,
        "tensors": [(str(t.dtype).removeprefix("torch."), t.shape) for t in packet.tensors],
        "reason": packet.reason[:_MAX_REASON],
    }
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    if len(raw) > HEADER_BYTES - _LENGTH.size:
        raise ValueError(
            f"the types and shapes of {len(packet.tensors)} tensors take {len(raw)} bytes, and a "
            f"header has {HEADER_BYTES}; cut elsewhere, or return fewer tensors from that layer"
        )
    header = bytearray(HEADER_BYTES)
    header[: _LENGTH.size + len(raw)] = _LENGTH.pack(len(raw)) + raw
    return torch.frombuffer(header, dtype=torch.uint8)


def decode(header: Tensor, *, sequence: int) -> tuple[Packet, list[TensorSpec]]:
    """Return a packet without its tensors, and the types and shapes of those that follow."""
    raw = header.numpy().tobytes()
    try:
        (length,) = _LENGTH.unpack_from(raw)
        fields = json.loads(raw[_LENGTH.size : _LENGTH.size + length])
        found, specs = fields.pop("sequence"), fields.pop("tensors")
        specs = [(getattr(torch, dtype), tuple(shape)) for dtype, shape in specs]
        packet = Packet(**fields | {"needs_grad": tuple(fields["needs_grad"])})
        is_valid = packet.kind in get_args(PacketKind) and all(
            isinstance(dtype, torch.dtype) and all(size >= 0 for size in shape)
            for dtype, shape in specs
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        is_valid = False
    if is_valid and found == sequence:
        return packet, specs
    what = f"an invalid header, {raw[:64]!r}..."
    if is_valid:
        what = f"message {found}, where message {sequence} was due"
    raise ValueError(f"sent {what}; do all ranks run the same program and version?")
