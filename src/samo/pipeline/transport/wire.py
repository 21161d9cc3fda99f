"""What travels over a link: packets, and the numbers that stand before their tensors.

A packet is a header of fixed size, a body of a known number of words, then its tensors. The body says
which tensors come, by their *form*: types and shapes; that of an "abort" says why.
`pack` puts all of it into one buffer, so that a packet is one message. A receiver waits with room for
the largest packet so far; "grow" comes before a larger one. Order alone tells packets apart: no tags are
needed, which NCCL does not have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from samo.errors import PeerError

__all__ = [
    "Decoder",
    "Encoder",
    "Form",
    "Header",
    "Packet",
    "PacketKind",
    "body_of",
    "pack",
    "places",
    "unpack",
]

PacketKind = Literal["activation", "gradient", "loss", "probe", "alive", "abort", "end", "grow"]
DATA_KINDS: Final[tuple[PacketKind, ...]] = ("activation", "gradient", "loss")
_KINDS: Final[tuple[PacketKind, ...]] = (*DATA_KINDS, "probe", "alive", "abort", "end", "grow")
_MAGIC: Final = 0x73616D6F
_MAX_WORDS: Final = 1 << 16
_DTYPES: Final = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
HEADER_WORDS: Final = 10
_ALIGNMENT: Final = 64

TensorForm = tuple[torch.dtype, bool, tuple[int, ...]]
Form = tuple[TensorForm, ...]
"""Type, whether a gradient comes back, and shape of each tensor of a packet."""


@dataclass(frozen=True)
class Packet:
    """A message with its tensors.

    Example:
        >>> from samo.pipeline.transport.wire import Packet
        >>> Packet("probe", step=3).tensors
        ()

    Attributes:
        kind: Data ("activation", "gradient", "loss") or control ("probe", "alive", "abort", "end", "grow").
        step: Number of the batch.
        micro_batch: Number of the micro-batch; for "grow", the bytes to make room for.
        tensors: What is sent.
        needs_grad: For each tensor, whether the receiver sends its gradient back.
        origin: For "abort", the stage to blame.
        reason: For "abort", what it did.
        is_training: Whether the batch goes backward.
    """

    kind: PacketKind
    step: int
    micro_batch: int = -1
    tensors: tuple[Tensor, ...] = ()
    needs_grad: tuple[bool, ...] = ()
    origin: int = -1
    reason: str = ""
    is_training: bool = True

    @property
    def form(self) -> Form:
        """Types and shapes."""
        return tuple(
            (t.dtype, flag, tuple(t.shape)) for t, flag in zip(self.tensors, self.needs_grad)
        )


@dataclass(frozen=True)
class Header:
    """A packet before its body and tensors have come."""

    kind: PacketKind
    step: int
    sequence: int
    micro_batch: int
    body_words: int
    origin: int
    is_training: bool


@dataclass
class Encoder:
    """The sending end of a directed link: numbers packets.

    Example:
        >>> from samo.pipeline.transport.wire import Encoder, Packet
        >>> words, body = Encoder(0).encode(Packet("probe", step=0))
        >>> len(words), body
        (10, [])
    """

    stage: int
    sequence: int = 0

    def encode(self, packet: Packet) -> tuple[list[int], list[int]]:
        """Return the words of the header and of the body, and count the packet as sent."""
        body = body_of(packet)
        words = [
            _MAGIC,
            _KINDS.index(packet.kind),
            packet.step,
            self.sequence,
            packet.micro_batch,
            len(body),
            packet.origin,
            int(packet.is_training),
            self.stage,
        ]
        self.sequence += 1
        return [*words, _checksum(words)], body


@dataclass
class Decoder:
    """The receiving end of a directed link: checks what comes against what must come.

    Example:
        >>> from samo.pipeline.transport.wire import Decoder, Encoder, Packet
        >>> words, body = Encoder(0).encode(Packet("probe", step=7))
        >>> Decoder(0).header(words).step
        7

    Attributes:
        stage: The stage that sends.
    """

    stage: int
    sequence: int = 0

    def header(self, words: Sequence[int]) -> Header:
        """Read a header.

        Raises:
            PeerError: It is none, or not the next one.
        """
        if len(words) != HEADER_WORDS or words[0] != _MAGIC or words[-1] != _checksum(words[:-1]):
            raise self.nonsense(f"a header that is none: {list(words)}")
        _, kind, step, sequence, micro_batch, body_words, origin, trains, stage = words[:-1]
        if not 0 <= kind < len(_KINDS) or not 0 <= body_words <= _MAX_WORDS:
            raise self.nonsense(f"a header with kind {kind} and {body_words} words")
        if stage != self.stage:
            raise self.nonsense(f"a header that calls itself stage {stage}")
        if sequence != self.sequence:
            raise self.nonsense(f"message {sequence}, where message {self.sequence} was due")
        self.sequence += 1
        return Header(_KINDS[kind], step, sequence, micro_batch, body_words, origin, bool(trains))

    def packet(
        self, header: Header, body: Sequence[int], tensors: tuple[Tensor, ...], form: Form
    ) -> Packet:
        """Put a packet together."""
        needs_grad = tuple(flag for _, flag, _ in form)
        reason = "" if header.kind in DATA_KINDS else _words_text(body)
        return Packet(
            header.kind,
            header.step,
            header.micro_batch,
            tensors,
            needs_grad,
            header.origin,
            reason,
            header.is_training,
        )

    def form(self, body: Sequence[int]) -> Form:
        """Return types and shapes of the tensors that follow.

        Raises:
            PeerError: The body is none of a form.
        """
        numbers = iter(body)
        found: list[TensorForm] = []
        try:
            for _ in range(next(numbers)):
                dtype, flag, rank = next(numbers), next(numbers), next(numbers)
                shape = tuple(next(numbers) for _ in range(rank))
                if not 0 <= dtype < len(_DTYPES) or any(size < 0 for size in shape):
                    raise self.nonsense(f"a form with type {dtype} and shape {shape}")
                found.append((_DTYPES[dtype], bool(flag), shape))
        except (StopIteration, RuntimeError) as error:
            if isinstance(error, PeerError):
                raise
            raise self.nonsense(f"a form that breaks off after {len(found)} tensors") from None
        return tuple(found)

    def nonsense(self, what: str) -> PeerError:
        """Return an error that names the sender."""
        return PeerError(
            f"stage {self.stage} sent {what}; do all ranks run the same program and version?",
            stage=self.stage,
        )


def places(form: Form, body_words: int) -> tuple[list[int], int]:
    """Return where in a buffer the tensors of a form begin, and the buffer's bytes.

    Example:
        >>> import torch
        >>> from samo.pipeline.transport.wire import places
        >>> places(((torch.float32, False, (3,)), (torch.bool, False, (2,))), 0)
        ([128, 192], 256)
    """
    starts, place = [], _aligned(8 * (HEADER_WORDS + body_words))
    for dtype, _, shape in form:
        starts.append(place)
        place += _aligned(math.prod(shape) * dtype.itemsize)
    return starts, place


def pack(words: list[int], body: list[int], tensors: Sequence[Tensor], buffer: Tensor) -> None:
    """Write header, body and tensors into a buffer of `places`; copies from a GPU are not waited for."""
    numbers = [*words, *body]
    buffer[: 8 * len(numbers)].view(torch.int64).copy_(torch.tensor(numbers))
    form = tuple((t.dtype, False, tuple(t.shape)) for t in tensors)
    for start, tensor in zip(places(form, len(body))[0], tensors):
        target = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor, non_blocking=True)


def unpack(decoder: "Decoder", buffer: Tensor, *, has_tensors: bool) -> tuple[Packet, Form]:
    """Read a packet out of a buffer; its tensors share the buffer's memory unless they are small.

    Raises:
        PeerError: What stands there is no packet.
    """
    header = decoder.header(buffer[: 8 * HEADER_WORDS].view(torch.int64).tolist())
    end = 8 * (HEADER_WORDS + header.body_words)
    if end > buffer.numel():
        raise decoder.nonsense(f"a body of {header.body_words} words in {buffer.numel()} bytes")
    body = buffer[8 * HEADER_WORDS : end].view(torch.int64).tolist()
    form = decoder.form(body) if header.kind in DATA_KINDS else ()
    tensors: list[Tensor] = []
    starts, needed = places(form, header.body_words)
    if has_tensors and form:
        if needed > buffer.numel():
            raise decoder.nonsense(f"a form of {needed} bytes where there are {buffer.numel()}")
        for start, (dtype, _, shape) in zip(starts, form):
            size = math.prod(shape) * dtype.itemsize
            tensor = buffer[start : start + size].view(dtype).view(shape)
            tensors.append(tensor.clone() if 2 * needed < buffer.numel() else tensor)
    return decoder.packet(header, body, tuple(tensors), form), form


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def body_of(packet: Packet) -> list[int]:
    """Return the words that follow the header: the form of the tensors, or a reason."""
    is_data = packet.kind in DATA_KINDS
    return _form_words(packet.form) if is_data else _text_words(packet.reason[:2000])


def _form_words(form: Form) -> list[int]:
    words = [len(form)]
    for dtype, flag, shape in form:
        if dtype not in _DTYPES:
            raise TypeError(
                f"a stage put out a tensor of {dtype}, which is not sent; cast it to one of "
                f"{', '.join(str(known).removeprefix('torch.') for known in _DTYPES)}"
            )
        words += [_DTYPES.index(dtype), int(flag), len(shape), *shape]
    return words


def _text_words(text: str) -> list[int]:
    raw = text.encode()
    raw += b"\0" * (-len(raw) % 7)
    return [int.from_bytes(raw[i : i + 7], "little") for i in range(0, len(raw), 7)]


def _words_text(words: Sequence[int]) -> str:
    raw = b"".join((word & (1 << 56) - 1).to_bytes(7, "little") for word in words)
    return raw.rstrip(b"\0").decode(errors="replace")


def _checksum(words: Sequence[int]) -> int:
    total = 0
    for word in words:
        total = (total * 31 + word) % 0x7FFFFFFF
    return total
