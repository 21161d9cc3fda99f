"""Packets as bytes: what is sent arrives, and what is invalid is refused."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from samo.pipeline.transport.wire import (
    HEADER_BYTES,
    Decoder,
    Encoder,
    Packet,
    pack,
    unpack,
    with_tensors,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def sent(encoder: Encoder, decoder: Decoder, packet: Packet) -> tuple[Packet, int]:
    """Send a packet; return what arrives, and the bytes of header and JSON."""
    raw = encoder.encode(packet)
    header, text = raw[:HEADER_BYTES], raw[HEADER_BYTES:]
    assert decoder.text_bytes(header) == len(text)
    found, layout = decoder.decode(header, text)
    body = pack(packet.tensors) if packet.tensors else torch.empty(0, dtype=torch.uint8)
    assert body.numel() == layout.nbytes
    return with_tensors(found, body.clone(), layout), len(raw)


@settings(max_examples=50)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))),
    seed=st.none() | st.integers(-(2**62), 2**62),
    is_training=st.booleans(),
)
def test_a_packet_arrives_as_it_was_and_announces_its_layout_once(
    shapes: list[Any], seed: int | None, is_training: bool
) -> None:
    tensors = tuple(torch.rand(shape).to(dtype) for dtype, shape in shapes)
    flags = tuple(tensor.is_floating_point() for tensor in tensors)
    packet = Packet("activation", 3, 2, 1, tensors, flags, flags, "", is_training, seed)
    encoder, decoder = Encoder(), Decoder()
    for number in range(3):
        found, size = sent(encoder, decoder, packet)
        assert size == HEADER_BYTES or (number == 0 and tensors)
        assert found._replace(tensors=()) == packet._replace(tensors=())
        assert all(map(torch.equal, found.tensors, tensors))
        assert [t.dtype for t in found.tensors] == [t.dtype for t in tensors]


def test_tensors_of_a_body_may_be_changed_in_place_one_by_one() -> None:
    tensors = (torch.ones(3), torch.ones(2, 2).t(), torch.tensor(3))
    body = pack(tensors)
    found = unpack(body, sent_layout(tensors))
    found[0].requires_grad_()
    product = (found[0] * found[0]).sum()
    found[1].zero_()  # shares memory, and no version, with what the product needs for backward
    product.backward()
    assert torch.equal(found[0].grad, 2 * tensors[0])
    assert found[2] == 3


def sent_layout(tensors: tuple[torch.Tensor, ...]) -> Any:
    raw = Encoder().encode(Packet("activation", 0, tensors=tensors))
    return Decoder().decode(raw[:HEADER_BYTES], raw[HEADER_BYTES:])[1]


def test_many_layouts_are_announced_again() -> None:
    """Sequences of any length: 1,024 layouts are remembered."""
    encoder, decoder = Encoder(), Decoder()
    for length in (*range(1500), *range(1500)):
        packet = Packet("activation", 0, tensors=(torch.ones(length),))
        assert sent(encoder, decoder, packet)[0].tensors[0].shape == (length,)


def test_a_long_reason_is_cut() -> None:
    packet = Packet("abort", 1, stage=2, reason="ValueError: größer\n als 3")
    assert sent(Encoder(), Decoder(), packet)[0] == packet
    found, _ = sent(Encoder(), Decoder(), Packet("abort", 1, reason="ß" * 9999))
    assert found.reason == "ß" * 1000


def changed(place: int, value: int) -> bytes:
    raw = bytearray(Encoder().encode(Packet("probe", 0)))
    raw[place] = value
    return bytes(raw)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (changed(0, 7), "sent an invalid header"),
        (changed(2, 99), "an invalid header"),
        (changed(HEADER_BYTES - 1, 255), "an invalid header"),
        (changed(HEADER_BYTES - 5, 0), "an invalid header"),  # a layout that was not announced
        (changed(4, 4), "sent message 4, where message 0 was due; do all ranks run"),
    ],
)
def test_an_invalid_header_is_refused(header: bytes, text: str) -> None:
    decoder = Decoder()
    with pytest.raises(ValueError, match=text):
        decoder.decode(header, bytes(decoder.text_bytes(header)))


@pytest.mark.parametrize(
    "layout",
    [
        b"\xff\xfe",
        b"{}1",
        b"3",
        json.dumps([["nn", [2], False, False]]).encode(),
        json.dumps([["float32", [-2], False, False]]).encode(),
        json.dumps([["float32", ["a"], False, False]]).encode(),
        json.dumps([["float32", [2], 1, False]]).encode(),
        json.dumps([["float32"]]).encode(),
    ],
)
def test_an_invalid_layout_is_refused(layout: bytes) -> None:
    raw = Encoder().encode(Packet("activation", 0, tensors=(torch.ones(2),)))
    with pytest.raises(ValueError, match="sent an invalid header"):
        Decoder().decode(raw[:HEADER_BYTES], layout)
