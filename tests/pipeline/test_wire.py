"""Headers: what is sent arrives, and what is invalid is refused."""

import dataclasses
import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from samo.pipeline.transport.gloo import as_bytes
from samo.pipeline.transport.wire import HEADER_BYTES, Packet, decode, encode

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@settings(max_examples=50)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))),
    sequence=st.integers(0, 2**40),
)
def test_a_header_announces_its_tensors(shapes: list[Any], sequence: int) -> None:
    tensors = tuple(torch.ones(shape).to(dtype) for dtype, shape in shapes)
    flags = tuple(tensor.is_floating_point() for tensor in tensors)
    sent = Packet("activation", 3, 2, 1, tensors, flags, is_training=False)
    packet, specs = decode(encode(sent, sequence), sequence=sequence)
    assert packet == dataclasses.replace(sent, tensors=())
    assert specs == [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    for tensor, (dtype, shape) in zip(tensors, specs):
        received = torch.empty(shape, dtype=dtype)
        as_bytes(received).copy_(as_bytes(tensor))
        assert torch.equal(received, tensor)


def test_a_long_reason_is_cut() -> None:
    packet = Packet("abort", 1, stage=2, reason="ValueError: größer\n als 3")
    assert decode(encode(packet, 0), sequence=0) == (packet, [])
    packet, _ = decode(encode(Packet("abort", 1, reason="ß" * 9999), 0), sequence=0)
    assert packet.reason == "ß" * 1000


def header(raw: bytes | None = None, **changes: Any) -> torch.Tensor:
    """Return a header with other bytes, or with other fields."""
    if raw is None:
        whole = encode(Packet("probe", 0), 0).numpy().tobytes()
        fields = json.loads(whole[4 : 4 + struct.unpack_from("<I", whole)[0]])
        raw = json.dumps(fields | changes).encode()
    packed = struct.pack("<I", len(raw)) + raw
    return torch.frombuffer(bytearray(packed.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (header(b"\xff\xfe"), "sent an invalid header"),
        (header(b"[]"), "an invalid header"),
        (header(b"{}"), "an invalid header"),
        (header(kind="nonsense"), "an invalid header"),
        (header(color="red"), "an invalid header"),
        (header(tensors=[["nn", [2]]]), "an invalid header"),
        (header(tensors=[["float32", [-2]]]), "an invalid header"),
        (header(sequence=4), "sent message 4, where message 0 was due; do all ranks run"),
    ],
)
def test_an_invalid_header_is_refused(sent: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        decode(sent, sequence=0)


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes of 500 tensors take \d+ bytes, and a header has"):
        encode(Packet("activation", 0, tensors=(torch.ones(2),) * 500), 0)
