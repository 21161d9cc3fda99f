"""Packets as bytes: what is sent arrives, and what is invalid is refused."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from samo.pipeline.transport.wire import (
    HEADER_BYTES,
    Layout,
    Packet,
    decode,
    encode,
    pack,
    text_bytes,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def sent(packet: Packet) -> tuple[Packet, Layout]:
    """Send a packet; return what arrives."""
    raw = encode(packet)
    header, text = raw[:HEADER_BYTES], raw[HEADER_BYTES:]
    assert text_bytes(header) == len(text)
    found, layout = decode(header, text)
    body = pack(packet.tensors) if packet.tensors else torch.empty(0, dtype=torch.uint8)
    assert body.numel() == layout.nbytes
    return found._replace(tensors=unpack(body.clone(), layout)), layout


@settings(max_examples=50)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))),
    seed=st.none() | st.integers(-(2**62), 2**62),
    is_training=st.booleans(),
)
def test_a_packet_arrives_as_it_was(shapes: list[Any], seed: int | None, is_training: bool) -> None:
    tensors = tuple(torch.rand(shape).to(dtype) for dtype, shape in shapes)
    flags = tuple(tensor.is_floating_point() for tensor in tensors)
    packet = Packet("activation", 3, 2, 1, tensors, flags, flags, "", is_training, seed)
    found, _ = sent(packet)
    assert found._replace(tensors=()) == packet._replace(tensors=())
    assert all(map(torch.equal, found.tensors, tensors))
    assert [t.dtype for t in found.tensors] == [t.dtype for t in tensors]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(2, 3, 4).transpose(0, 2),
        torch.rand(4, 30)[:0, ::5],
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(3, 1, 2).permute(2, 1, 0),
        torch.rand(6, 4)[::2],
        torch.rand(3, 1).expand(3, 4),
        torch.rand(0, 3).t(),
    ],
)
def test_a_tensor_keeps_its_order_in_memory(tensor: torch.Tensor) -> None:
    for others in ((), (torch.ones(3),)):
        found = sent(Packet("activation", tensors=(tensor, *others)))[0].tensors[0]
        assert torch.equal(found, tensor)
        assert found.stride() == tensor.clone().stride()


def test_tensors_of_a_body_may_be_changed_in_place_one_by_one() -> None:
    tensors = (torch.ones(3), torch.ones(2, 2).t(), torch.tensor(3))
    found = sent(Packet("activation", tensors=tensors))[0].tensors
    found[0].requires_grad_()
    product = (found[0] * found[0]).sum()
    found[1].zero_()  # shares memory, and no version, with what the product needs for backward
    product.backward()
    assert torch.equal(found[0].grad, 2 * tensors[0])
    assert found[2] == 3


def test_a_long_reason_is_cut() -> None:
    packet = Packet("abort", stage=2, reason="ValueError: größer\n als 3")
    assert sent(packet)[0] == packet
    assert sent(Packet("abort", reason="ß" * 9999))[0].reason == "ß" * 1000


def changed(place: int, value: int) -> bytes:
    raw = bytearray(encode(Packet("probe")))
    raw[place] = value
    return bytes(raw)


@pytest.mark.parametrize("header", [changed(0, 7), changed(2, 99), changed(HEADER_BYTES - 1, 255)])
def test_an_invalid_header_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match="sent an invalid header"):
        text_bytes(header)


@pytest.mark.parametrize(
    "layout",
    [
        b"\xff\xfe",
        b"{}1",
        b"3",
        json.dumps([["nn", [2], [1], False, False]]).encode(),
        json.dumps([["float32", [-2], [1], False, False]]).encode(),
        json.dumps([["float32", ["a"], [1], False, False]]).encode(),
        json.dumps([["float32", [2], [1], 1, False]]).encode(),
        json.dumps([["float32", [2], [], False, False]]).encode(),
        json.dumps([["float32", [2], [4], False, False]]).encode(),
        json.dumps([["float32", [2, 2], [0, 1], False, False]]).encode(),
        json.dumps([["float32", [2, 2], [-1, 1], False, False]]).encode(),
        json.dumps([["float32"]]).encode(),
    ],
)
def test_an_invalid_layout_is_refused(layout: bytes) -> None:
    raw = encode(Packet("activation", tensors=(torch.ones(2),)))
    with pytest.raises(ValueError, match="sent an invalid header"):
        decode(raw[:HEADER_BYTES], layout)
