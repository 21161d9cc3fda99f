"""What travels between stages: packets that come out as they went in, and nonsense that is named."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import samo
from samo.pipeline.transport.wire import Decoder, Encoder, Packet, pack, places, unpack


def through_a_buffer(encoder: Encoder, decoder: Decoder, packet: Packet, room: int = 0) -> Packet:
    words, body = encoder.encode(packet)
    size = places(packet.form, len(body))[1]
    buffer = torch.full((max(size, room),), 255, dtype=torch.uint8)
    pack(words, body, packet.tensors, buffer[:size])
    return unpack(decoder, buffer, has_tensors=True)[0]


@settings(max_examples=100)
@given(st.data())
def test_a_packet_comes_out_of_a_buffer_as_it_went_in(data: st.DataObject) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.uint8]
    encoder, decoder = Encoder(3), Decoder(3)
    for step in range(data.draw(st.integers(1, 4))):
        tensors = tuple(
            torch.randint(0, 2, tuple(shape)).to(dtype)
            for dtype, shape in data.draw(
                st.lists(
                    st.tuples(st.sampled_from(dtypes), st.lists(st.integers(0, 3), max_size=3)),
                    max_size=3,
                )
            )
        )
        flags = tuple(tensor.is_floating_point() for tensor in tensors)
        sent = Packet("activation", step, step, tensors, flags)
        got = through_a_buffer(encoder, decoder, sent, room=data.draw(st.sampled_from([0, 9999])))
        assert (got.kind, got.step, got.micro_batch, got.needs_grad) == (
            sent.kind,
            step,
            step,
            flags,
        )
        assert got.form == sent.form
        assert all(torch.equal(a, b) for a, b in zip(got.tensors, tensors, strict=True))


def test_a_reason_travels_whole() -> None:
    packet = Packet("abort", 1, origin=2, reason="ValueError: größer als 3")
    assert through_a_buffer(Encoder(0), Decoder(0), packet) == packet
    packet = Packet("gradient", 1, 0, is_training=False)
    assert through_a_buffer(Encoder(0), Decoder(0), packet) == packet


def words_of(**changes: int) -> list[int]:
    from samo.pipeline.transport import wire

    words, _ = Encoder(1).encode(Packet("probe", 0))
    names = ["magic", "kind", "step", "sequence", "micro_batch", "body", "origin", "is_training"]
    names += ["stage"]
    for name, value in changes.items():
        words[names.index(name)] = value
    return [*words[:-1], wire._checksum(words[:-1])]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (words_of(magic=7), "stage 1 sent a header that is none"),
        ([*words_of()[:-1], 5], "stage 1 sent a header that is none"),
        (words_of(kind=99), "a header with kind 99"),
        (words_of(body=-1), "and -1 words"),
        (words_of(stage=2), "a header that calls itself stage 2"),
        (words_of(sequence=4), "message 4, where message 0 was due; do all ranks run"),
    ],
)
def test_a_header_that_is_nonsense_names_its_sender(words: list[int], text: str) -> None:
    with pytest.raises(samo.PeerError, match=text) as caught:
        Decoder(1).header(words)
    assert caught.value.stage == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ([], "a form that breaks off after 0 tensors"),
        ([1, 99, 0, 0], "a form with type 99"),
        ([1, 0, 0, 1, -4], r"and shape \(-4,\)"),
        ([2, 0, 0, 0], "a form that breaks off after 1 tensors"),
    ],
)
def test_a_form_that_is_nonsense_names_its_sender(body: list[int], text: str) -> None:
    with pytest.raises(samo.PeerError, match=text):
        Decoder(1).form(body)


@pytest.mark.parametrize(
    ("packet", "size", "text"),
    [
        (Packet("activation", 0, 0, (torch.ones(99),), (True,)), 128, "a form of 576 bytes where"),
        (Packet("abort", 0, reason="x" * 99), 128, "a body of 15 words in 128 bytes"),
    ],
)
def test_a_packet_larger_than_its_buffer_is_refused(packet: Packet, size: int, text: str) -> None:
    words, body = Encoder(0).encode(packet)
    buffer = torch.zeros(9999, dtype=torch.uint8)
    pack(words, body, packet.tensors, buffer)
    with pytest.raises(samo.PeerError, match=text):
        unpack(Decoder(0), buffer[:size], has_tensors=True)


def test_a_type_that_is_not_sent_is_refused() -> None:
    packet = Packet("activation", 0, 0, (torch.ones(2).to(torch.float8_e5m2),), (False,))
    with pytest.raises(
        TypeError, match=r"a tensor of torch\.float8_e5m2, which is not sent; cast it"
    ):
        Encoder(0).encode(packet)
