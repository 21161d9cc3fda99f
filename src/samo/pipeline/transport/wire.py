"""Packets between stages, and the header that announces one.

A packet travels as a header of fixed size, then its tensors, one message each:

    | uint32 length | {"kind": "activation", "sequence": 7, "tensors": [["float32", [8, 16]]], ...} | 0 ... |

A receiver can wait for a header without knowing what comes; the JSON in it says which tensors
follow. Order alone identifies packets: no tags are needed, which NCCL does not have.
"""

import json
import struct
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from samo.errors import PeerError

__all__ = ["DATA_KINDS", "HEADER_BYTES", "Packet", "PacketKind", "decode", "encode"]

PacketKind = Literal["activation", "gradient", "loss", "probe", "alive", "abort", "end"]
DATA_KINDS: Final = ("activation", "gradient", "loss")
HEADER_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("<I")
_MAX_REASON: Final = 1000

TensorSpec = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Packet:
    """A message with its tensors.

    Attributes:
        kind: Data ("activation", "gradient", "loss") or control ("probe", "alive", "abort", "end").
        step: Number of the batch.
        micro_batch: Number of the micro-batch.
        tensors: The payload.
        needs_grad: For each activation, whether its gradient is to be sent back.
        origin: For "abort", the stage that failed.
        reason: For "abort", how it failed.
        is_training: Whether the batch has a backward pass.
    """

    kind: PacketKind
    step: int
    micro_batch: int = -1
    tensors: tuple[Tensor, ...] = ()
    needs_grad: tuple[bool, ...] = ()
    origin: int = -1
    reason: str = ""
    is_training: bool = True


def encode(packet: Packet, sequence: int) -> Tensor:
    """Return the header of the ``sequence``-th packet of a link.

    Example:
        >>> from samo.pipeline.transport.wire import Packet, decode, encode
        >>> header = encode(Packet("probe", step=7), sequence=0)
        >>> decode(header, stage=0, sequence=0)[0].step
        7

    Raises:
        ValueError: There are too many tensors for a header.
    """
    fields = {
        "kind": packet.kind,
        "sequence": sequence,
        "step": packet.step,
        "micro_batch": packet.micro_batch,
        "tensors": [(str(t.dtype).removeprefix("torch."), t.shape) for t in packet.tensors],
        "needs_grad": packet.needs_grad,
        "origin": packet.origin,
        "reason": packet.reason[:_MAX_REASON],
        "is_training": packet.is_training,
    }
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    if len(raw) > HEADER_BYTES - _LENGTH.size:
        raise ValueError(
            f"the types and shapes of {len(packet.tensors)} tensors take {len(raw)} bytes, and a header "
            f"has {HEADER_BYTES}; return fewer tensors from the last layer of a stage, or cut elsewhere"
        )
    header = bytearray(HEADER_BYTES)
    header[: _LENGTH.size + len(raw)] = _LENGTH.pack(len(raw)) + raw
    return torch.frombuffer(header, dtype=torch.uint8)


def decode(header: Tensor, *, stage: int, sequence: int) -> tuple[Packet, list[TensorSpec]]:
    """Return a packet without its tensors, and the types and shapes of those that follow.

    Raises:
        PeerError: It is not a header, or not the next one of the link from ``stage``.
    """
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
    if not is_valid:
        raise _invalid(stage, f"an invalid header, {raw[:64]!r}...")
    if found != sequence:
        raise _invalid(stage, f"message {found}, where message {sequence} was due")
    return packet, specs


def _invalid(stage: int, what: str) -> PeerError:
    return PeerError(
        f"stage {stage} sent {what}; do all ranks run the same program and version?", stage=stage
    )
