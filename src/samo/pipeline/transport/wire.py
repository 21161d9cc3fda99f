"""Packets between stages, as bytes.

    | header, fixed size | JSON: a layout that is new, or a reason | body: the tensors |

A layout is the types, shapes and needs of gradients of a packet's tensors. It is announced once for
each link and has a number from then on, so a packet costs a few dozen bytes. The body is one block
of memory, each tensor at a multiple of 16 bytes: one message, or one NCCL kernel, for any number of
tensors. Order alone identifies packets: no tags are needed, which NCCL does not have.
"""

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

__all__ = ["HEADER_BYTES", "Decoder", "Encoder", "Layout", "Packet", "PacketKind", "pack", "unpack"]

PacketKind = Literal["activation", "gradient", "loss", "probe", "alive", "abort"]
_KINDS: Final = get_args(PacketKind)
# magic, kind, flags, sequence, step, micro-batch, stage, seed, layout, bytes of JSON
_HEADER: Final = struct.Struct("<HBBIIiiqii")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = 0x5A40
_IS_TRAINING, _HAS_SEED = 1, 2
_MAX_TEXT: Final = 2**20
_MAX_REASON: Final = 1000
_MAX_LAYOUTS: Final = 1024
_ALIGNMENT: Final = 16


class TensorSpec(NamedTuple):
    """A tensor of a layout, as `Packet` describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool = False
    is_narrow: bool = False


class Layout(NamedTuple):
    """The tensors of a packet, and where they lie in its body: worked out once, when announced."""

    specs: tuple[TensorSpec, ...] = ()
    places: tuple[slice, ...] = ()
    nbytes: int = 0
    needs_grad: tuple[bool, ...] = ()
    is_narrow: tuple[bool, ...] = ()


class Packet(NamedTuple):
    """A message with its tensors, of the ``step``-th batch."""

    kind: PacketKind
    step: int
    micro_batch: int = -1
    stage: int = -1  # the one that receives the data or, for "abort", that failed
    tensors: tuple[Tensor, ...] = ()
    needs_grad: tuple[bool, ...] = ()  # for each activation, whether to send its gradient back
    is_narrow: tuple[bool, ...] = ()  # for each tensor, whether it was float32 before it was sent
    reason: str = ""  # for "abort", how the stage failed
    is_training: bool = True  # whether the batch has a backward pass
    seed: int | None = None  # of what layers draw for this micro-batch


class Encoder:
    """Writes the headers of one directed link."""

    def __init__(self) -> None:
        self.sequence = 0
        self._layouts: dict[tuple[object, ...], int] = {}

    def encode(self, packet: Packet) -> bytes:
        """Return the header of the next packet, and its JSON if there is any."""
        text, number = b"", -1
        if packet.tensors:
            nothing = (False,) * len(packet.tensors)
            needs, narrow = packet.needs_grad or nothing, packet.is_narrow or nothing
            rows = zip(packet.tensors, needs, narrow, strict=True)
            key = tuple((t.dtype, t.shape, need, is_narrow) for t, need, is_narrow in rows)
            number = self._layouts.get(key, -1)
            if number < 0:
                if len(self._layouts) == _MAX_LAYOUTS:  # begin again, and announce them anew
                    self._layouts.clear()
                number = self._layouts[key] = len(self._layouts)
                fields = [(str(dtype).removeprefix("torch."), *rest) for dtype, *rest in key]
                text = json.dumps(fields).encode()
        elif packet.reason:
            text = json.dumps(packet.reason[:_MAX_REASON]).encode()
        bits = _IS_TRAINING * packet.is_training + _HAS_SEED * (packet.seed is not None)
        header = _HEADER.pack(
            _MAGIC,
            _KINDS.index(packet.kind),
            bits,
            self.sequence % 2**32,
            packet.step % 2**32,
            packet.micro_batch,
            packet.stage,
            packet.seed or 0,
            number,
            len(text),
        )
        self.sequence += 1
        return header + text


class Decoder:
    """Reads the headers of one directed link."""

    def __init__(self) -> None:
        self.sequence = 0
        self._layouts: dict[int, Layout] = {}

    def text_bytes(self, header: bytes | bytearray) -> int:
        """Return how many bytes of JSON follow a header."""
        magic, kind, *_, length = _HEADER.unpack(header)
        if magic != _MAGIC or kind >= len(_KINDS) or not 0 <= length <= _MAX_TEXT:
            raise _invalid(header)
        return int(length)

    def decode(
        self, header: bytes | bytearray, text: bytes | bytearray = b""
    ) -> tuple[Packet, Layout]:
        """Return a packet without its tensors, and the layout of those that follow."""
        _, kind, bits, sequence, step, micro_batch, stage, seed, number, _ = _HEADER.unpack(header)
        if sequence != self.sequence % 2**32:
            raise ValueError(
                f"sent message {sequence}, where message {self.sequence} was due; do all ranks run "
                "the same program and version?"
            )
        self.sequence += 1
        reason, layout = "", Layout()
        try:
            found = json.loads(text) if text else None
            if number >= 0:
                if found is not None:
                    self._layouts[number] = layout_of(_specs(found))
                layout = self._layouts[number]
            elif found is not None:
                reason = str(found)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise _invalid(bytes(header) + bytes(text)) from None
        packet = Packet(
            _KINDS[kind],
            step,
            micro_batch,
            stage,
            needs_grad=layout.needs_grad,
            is_narrow=layout.is_narrow,
            reason=reason,
            is_training=bool(bits & _IS_TRAINING),
            seed=seed if bits & _HAS_SEED else None,
        )
        return packet, layout


def layout_of(specs: Sequence[TensorSpec]) -> Layout:
    """Place tensors in a body, each at a multiple of 16 bytes."""
    places: list[slice] = []
    end = 0
    for spec in specs:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + spec.dtype.itemsize * math.prod(spec.shape)
        places.append(slice(start, end))
    needs_grad = tuple(spec.needs_grad for spec in specs)
    is_narrow = tuple(spec.is_narrow for spec in specs)
    return Layout(tuple(specs), tuple(places), end, needs_grad, is_narrow)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one body: a view of one that is contiguous, else a copy of all."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1).view(torch.uint8)
    layout = layout_of([TensorSpec(tensor.dtype, tensor.shape) for tensor in tensors])
    body = torch.empty(layout.nbytes, dtype=torch.uint8, device=tensors[0].device)
    for place, tensor in zip(unpack(body, layout), tensors):
        place.copy_(tensor)
    return body


def unpack(body: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """Return the tensors of a body. They share its memory, and no version counter."""
    if len(layout.specs) == 1:  # nobody to share with
        (spec,) = layout.specs
        return (body.view(spec.dtype).view(spec.shape),)
    return tuple(
        body[place].view(spec.dtype).view(spec.shape).data
        for spec, place in zip(layout.specs, layout.places)
    )


def _specs(found: object) -> list[TensorSpec]:
    rows: Any = found
    specs = [TensorSpec(getattr(torch, d), tuple(shape), *more) for d, shape, *more in rows]
    for dtype, shape, *flags in specs:
        if not isinstance(dtype, torch.dtype) or not all(isinstance(flag, bool) for flag in flags):
            raise TypeError
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError
    return specs


def _invalid(header: bytes | bytearray) -> ValueError:
    return ValueError(
        f"sent an invalid header, {bytes(header[:64])!r}...; do all ranks run the same program and "
        "version?"
    )


def with_tensors(packet: Packet, body: Tensor, layout: Layout) -> Packet:
    """Return a packet with the tensors of its body."""
    return packet._replace(tensors=unpack(body, layout))
