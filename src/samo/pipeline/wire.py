"""What travels over a link: packets, and the numbers that stand before their tensors.

A packet is a header of fixed size, sometimes a body of a known number of words, then its tensors. The
header says which tensors come by the number of their *form*: types and shapes. A form is sent once,
in the body of the first packet that has it, so a smaller last micro-batch costs one body and no more.
Order alone tells packets apart: no tags are needed, which NCCL does not have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor

from samo.errors import PeerError

__all__ = ["HEADER_WORDS", "Decoder", "Encoder", "Form", "Header", "Packet", "PacketKind"]

PacketKind = Literal["activation", "gradient", "loss", "probe", "alive", "abort"]
DATA_KINDS: Final = ("activation", "gradient", "loss")
_KINDS: Final[tuple[PacketKind, ...]] = ("activation", "gradient", "loss", "probe", "alive", "abort")
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

TensorForm = tuple[torch.dtype, bool, tuple[int, ...]]
Form = tuple[TensorForm, ...]
"""Type, whether a gradient comes back, and shape of each tensor of a packet."""


@dataclass(frozen=True)
class Packet:
    """A message with its tensors.

    Example:
        >>> from samo.pipeline.wire import Packet
        >>> Packet("probe", step=3).tensors
        ()

    Attributes:
        kind: Data ("activation", "gradient", "loss") or control ("probe", "alive", "abort").
        step: Number of the batch.
        micro_batch: Number of the micro-batch, -1 for control.
        tensors: What is sent.
        needs_grad: For each tensor, whether the receiver sends its gradient back.
        origin: For "abort", the stage to blame.
        reason: For "abort", what it did.
    """

    kind: PacketKind
    step: int
    micro_batch: int = -1
    tensors: tuple[Tensor, ...] = ()
    needs_grad: tuple[bool, ...] = ()
    origin: int = -1
    reason: str = ""

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
    form: int
    body_words: int
    origin: int


@dataclass
class Encoder:
    """The sending end of a directed link: numbers packets and forms.

    Example:
        >>> from samo.pipeline.wire import Encoder, Packet
        >>> words, body = Encoder(0).encode(Packet("probe", step=0))
        >>> len(words), body
        (10, [])
    """

    stage: int
    sequence: int = 0
    forms: dict[Form, int] = field(default_factory=dict)

    def encode(self, packet: Packet) -> tuple[list[int], list[int]]:
        """Return the words of the header and of the body."""
        body: list[int] = []
        form = 0
        if packet.kind in DATA_KINDS:
            form = self.forms.get(packet.form, -1)
            if form < 0:
                form = self.forms[packet.form] = len(self.forms)
                body = _form_words(packet.form)
        elif packet.reason:
            body = _text_words(packet.reason[:2000])
        words = [
            _MAGIC,
            _KINDS.index(packet.kind),
            packet.step,
            self.sequence,
            packet.micro_batch,
            form,
            len(body),
            packet.origin,
            self.stage,
        ]
        self.sequence += 1
        return [*words, _checksum(words)], body


@dataclass
class Decoder:
    """The receiving end of a directed link: checks what comes against what must come.

    Example:
        >>> from samo.pipeline.wire import Decoder, Encoder, Packet
        >>> words, body = Encoder(0).encode(Packet("probe", step=7))
        >>> Decoder(0).header(words).step
        7

    Attributes:
        stage: The stage that sends.
    """

    stage: int
    sequence: int = 0
    forms: list[Form] = field(default_factory=list)

    def header(self, words: Sequence[int]) -> Header:
        """Read a header.

        Raises:
            PeerError: It is none, or not the next one.
        """
        if len(words) != HEADER_WORDS or words[0] != _MAGIC or words[-1] != _checksum(words[:-1]):
            raise self._nonsense(f"a header that is none: {list(words)}")
        _, kind, step, sequence, micro_batch, form, body_words, origin, stage = words[:-1]
        if not 0 <= kind < len(_KINDS) or not 0 <= body_words <= _MAX_WORDS:
            raise self._nonsense(f"a header with kind {kind} and {body_words} words")
        if stage != self.stage:
            raise self._nonsense(f"a header that calls itself stage {stage}")
        if sequence != self.sequence:
            raise self._nonsense(f"message {sequence}, where message {self.sequence} was due")
        self.sequence += 1
        return Header(_KINDS[kind], step, sequence, micro_batch, form, body_words, origin)

    def form(self, header: Header, body: Sequence[int]) -> Form:
        """Return types and shapes of the tensors that follow.

        Raises:
            PeerError: The form is unknown, or the body is not one.
        """
        if body:
            if header.form != len(self.forms):
                raise self._nonsense(f"form {header.form}, where {len(self.forms)} was next")
            self.forms.append(self._read_form(body))
        if not 0 <= header.form < len(self.forms):
            raise self._nonsense(f"tensors of form {header.form} of {len(self.forms)} known ones")
        return self.forms[header.form]

    def packet(
        self, header: Header, body: Sequence[int], tensors: tuple[Tensor, ...], form: Form
    ) -> Packet:
        """Put a packet together."""
        needs_grad = tuple(flag for _, flag, _ in form)
        reason = "" if header.kind in DATA_KINDS else _words_text(body)
        return Packet(
            header.kind, header.step, header.micro_batch, tensors, needs_grad, header.origin, reason
        )

    def _read_form(self, body: Sequence[int]) -> Form:
        numbers = iter(body)
        found: list[TensorForm] = []
        try:
            for _ in range(next(numbers)):
                dtype, flag, rank = next(numbers), next(numbers), next(numbers)
                shape = tuple(next(numbers) for _ in range(rank))
                if not 0 <= dtype < len(_DTYPES) or any(size < 0 for size in shape):
                    raise self._nonsense(f"a form with type {dtype} and shape {shape}")
                found.append((_DTYPES[dtype], bool(flag), shape))
        except (StopIteration, RuntimeError) as error:
            if isinstance(error, PeerError):
                raise
            raise self._nonsense(f"a form that breaks off after {len(found)} tensors") from None
        return tuple(found)

    def _nonsense(self, what: str) -> PeerError:
        return PeerError(
            f"stage {self.stage} sent {what}; do all ranks run the same program and version?",
            stage=self.stage,
        )


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
