"""Packets between stages, as bytes.

    | header, fixed size | text: the layout of the tensors, or a reason | body: the tensors |

A layout is the types, shapes, strides and needs of gradients of a packet's tensors, as JSON; both
sides remember what they have written and read. Strides are kept because they decide in which order
a kernel adds up: the next stage computes what one process would, to the last bit. The body is one
block of memory, each tensor at a multiple of 16 bytes: one message, or one NCCL kernel, for any
number of tensors. Links keep the order of packets, so no tags are needed, which NCCL does not have.
"""

import json
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

PacketKind = Literal["activation", "gradient", "probe", "alive", "abort"]
_KINDS: Final = get_args(PacketKind)
# magic, kind, flags, step, micro-batch, stage, seed, bytes of text
_HEADER: Final = struct.Struct("<HBBIiiqi")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = 0x5A40
_IS_TRAINING, _HAS_SEED = 1, 2
_MAX_TEXT: Final = 2**20
_MAX_REASON: Final = 1000
_ALIGNMENT: Final = 16


class TensorSpec(NamedTuple):
    """A tensor of a layout, as `Packet` describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    needs_grad: bool = False
    is_narrow: bool = False


class Layout(NamedTuple):
    """The tensors of a packet, and where they lie in its body."""

    specs: tuple[TensorSpec, ...] = ()
    places: tuple[slice, ...] = ()
    nbytes: int = 0


class Packet(NamedTuple):
    """A message with its tensors, of the ``step``-th batch."""

    kind: PacketKind
    step: int = 0
    micro_batch: int = -1
    stage: int = -1  # the one that receives the data or, for "abort", that failed
    tensors: tuple[Tensor, ...] = ()
    needs_grad: tuple[bool, ...] = ()  # for each tensor, whether to send its gradient back
    is_narrow: tuple[bool, ...] = ()  # for each tensor, whether it was float32 before it was sent
    reason: str = ""  # for "abort", how the stage failed
    is_training: bool = True  # whether the batch has a backward pass
    seed: int | None = None  # of what layers draw for the first micro-batch


def encode(packet: Packet) -> bytes:
    """Return the header of a packet, and its text."""
    text = b""
    if packet.tensors:
        nothing = (False,) * len(packet.tensors)
        needs, narrow = packet.needs_grad or nothing, packet.is_narrow or nothing
        rows = zip(packet.tensors, needs, narrow, strict=True)
        text = _written(tuple((t.dtype, t.shape, _strides(t), *flags) for t, *flags in rows))
    elif packet.reason:
        text = packet.reason[:_MAX_REASON].encode()
    header = _HEADER.pack(
        _MAGIC,
        _KINDS.index(packet.kind),
        _IS_TRAINING * packet.is_training + _HAS_SEED * (packet.seed is not None),
        packet.step % 2**32,
        packet.micro_batch,
        packet.stage,
        packet.seed or 0,
        len(text),
    )
    return header + text


def text_bytes(header: bytes | bytearray) -> int:
    """Return how many bytes of text follow a header."""
    magic, kind, *_, length = _HEADER.unpack(header)
    if magic != _MAGIC or kind >= len(_KINDS) or not 0 <= length <= _MAX_TEXT:
        raise _invalid(header)
    return int(length)


def decode(header: bytes | bytearray, text: bytes | bytearray) -> tuple[Packet, Layout]:
    """Return a packet without its tensors, and the layout of those that follow."""
    _, number, flags, step, micro_batch, stage, seed, _ = _HEADER.unpack(header)
    kind, reason, layout = _KINDS[number], "", Layout()
    try:
        if kind == "abort":
            reason = text.decode()
        elif text:
            layout = _read(bytes(text))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        raise _invalid(bytes(header) + bytes(text)) from None
    packet = Packet(
        kind,
        step,
        micro_batch,
        stage,
        needs_grad=tuple(spec.needs_grad for spec in layout.specs),
        is_narrow=tuple(spec.is_narrow for spec in layout.specs),
        reason=reason,
        is_training=bool(flags & _IS_TRAINING),
        seed=seed if flags & _HAS_SEED else None,
    )
    return packet, layout


@lru_cache(1024)
def _written(specs: tuple[tuple[Any, ...], ...]) -> bytes:
    rows = [(str(dtype).removeprefix("torch."), *rest) for dtype, *rest in specs]
    return json.dumps(rows).encode()


@lru_cache(1024)
def _read(text: bytes) -> Layout:
    specs = []
    for dtype, shape, strides, *flags in json.loads(text):
        # Raises for what is no type, size or stride, but for negative strides; takes no memory.
        like = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(like)
        if not is_dense or min(strides, default=0) < 0:
            raise ValueError
        if not all(isinstance(flag, bool) for flag in flags):
            raise TypeError
        specs.append(TensorSpec(like.dtype, tuple(shape), tuple(strides), *flags))
    return layout_of(specs)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor in a body: its own, without gaps and overlaps."""
    if not tensor.is_contiguous():
        tensor = torch.empty_like(tensor, device="meta")
    return tensor.stride()


def _invalid(header: bytes | bytearray) -> ValueError:
    return ValueError(
        f"sent an invalid header, {bytes(header[:64])!r}...; do all ranks run the same program and "
        "version?"
    )


def layout_of(specs: Sequence[TensorSpec]) -> Layout:
    """Place tensors in a body, each at a multiple of 16 bytes."""
    places: list[slice] = []
    end = 0
    for spec in specs:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + spec.dtype.itemsize * math.prod(spec.shape)
        places.append(slice(start, end))
    return Layout(tuple(specs), tuple(places), end)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one body: a view of one that is contiguous, else a copy of all."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1).view(torch.uint8)
    layout = layout_of([TensorSpec(t.dtype, t.shape, _strides(t)) for t in tensors])
    body = torch.empty(layout.nbytes, dtype=torch.uint8, device=tensors[0].device)
    for place, tensor in zip(unpack(body, layout), tensors):
        place.copy_(tensor)
    return body


def unpack(body: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """Return the tensors of a body. They share its memory, and no version counter."""
    if len(layout.specs) == 1:  # nobody to share with
        (spec,) = layout.specs
        return (body.view(spec.dtype).as_strided(spec.shape, spec.strides),)
    return tuple(
        body[place].view(spec.dtype).as_strided(spec.shape, spec.strides).data
        for spec, place in zip(layout.specs, layout.places)
    )
