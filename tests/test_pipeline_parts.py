"""The parts of a pipeline, each for itself: packets, cuts, layers, weights, micro-batches, threads."""

import copy
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn

import samo
from samo.pipeline.batches import cut, weights
from samo.pipeline.filling import build_stage
from samo.pipeline.layers import parameter_costs, take_apart
from samo.pipeline.memory import MemoryNetwork
from samo.pipeline.partition import partition
from samo.pipeline.runner import Batch, Runner, as_tuple
from samo.pipeline.wire import Decoder, Encoder, Packet, pack, places, unpack
from tests.pipeline_cases import tiny_gpt, tiny_hf, tokens

CPU = torch.device("cpu")

# Packets -----------------------------------------------------------------------------------------


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


def test_a_form_is_sent_once_and_a_smaller_one_again() -> None:
    encoder, decoder = Encoder(0), Decoder(0)
    for rows, is_new in [(4, True), (4, False), (3, True), (4, False), (3, False)]:
        packet = Packet("activation", 0, 0, (torch.ones(rows, 2),), (True,))
        assert bool(encoder.body(packet)) == is_new
        assert through_a_buffer(encoder, decoder, packet).tensors[0].shape == (rows, 2)


def test_a_reason_travels_whole() -> None:
    packet = Packet("abort", 1, origin=2, reason="ValueError: größer als 3")
    assert through_a_buffer(Encoder(0), Decoder(0), packet) == packet


def words_of(**changes: int) -> list[int]:
    from samo.pipeline import wire

    words, _ = Encoder(1).encode(Packet("probe", 0))
    names = ["magic", "kind", "step", "sequence", "micro_batch", "form", "body", "origin", "stage"]
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
    ("form", "body", "text"),
    [
        (0, [], "tensors of form 0 of 0 known ones"),
        (3, [0], "form 3, where 0 was next"),
        (0, [1, 99, 0, 0], "a form with type 99"),
        (0, [1, 0, 0, 1, -4], r"and shape \(-4,\)"),
        (0, [2, 0, 0, 0], "a form that breaks off after 1 tensors"),
    ],
)
def test_a_form_that_is_nonsense_names_its_sender(form: int, body: list[int], text: str) -> None:
    decoder = Decoder(1)
    header = decoder.header(words_of(kind=0, form=form, body=len(body)))
    with pytest.raises(samo.PeerError, match=text):
        decoder.form(header, body)


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


# Cuts --------------------------------------------------------------------------------------------


def all_cuts(count: int, num_stages: int):
    if num_stages == 1:
        yield [(0, count)]
        return
    for last in range(num_stages - 1, count):
        for before in all_cuts(last, num_stages - 1):
            yield [*before, (last, count)]


@settings(max_examples=200)
@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    memory=st.lists(st.integers(0, 9), min_size=8, max_size=8),
    num_stages=st.integers(1, 5),
    cap=st.none() | st.integers(0, 40),
    flights=st.lists(st.integers(1, 3), min_size=5, max_size=5),
)
def test_a_partition_is_the_best_of_all(costs, memory, num_stages, cap, flights) -> None:
    if len(costs) < num_stages:
        with pytest.raises(ValueError, match="layers cannot be cut into"):
            partition(costs, num_stages)
        return
    memory = memory[: len(costs)]

    def fits(cuts):
        return cap is None or all(
            sum(memory[a:b]) + flights[s] * sum(costs[a:b]) <= cap for s, (a, b) in enumerate(cuts)
        )

    possible = [cuts for cuts in all_cuts(len(costs), num_stages) if fits(cuts)]
    settings_ = {
        "memory": memory,
        "activations": costs,
        "in_flight": flights[:num_stages],
        "cap": cap,
    }
    if not possible:
        with pytest.raises(ValueError, match=r"no cut of .* holds .* bytes a stage or less"):
            partition(costs, num_stages, **settings_)
        return
    found = partition(costs, num_stages, **settings_)
    assert found in possible  # so no layer is lost, and none is empty
    slowest = min(max(sum(costs[a:b]) for a, b in cuts) for cuts in possible)
    assert max(sum(costs[a:b]) for a, b in found) == slowest


def test_wrong_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="costs must be 0 or more"):
        partition([1, -1], 1)
    with pytest.raises(ValueError, match="must be of one length, got 2 costs"):
        partition([1, 1], 1, memory=[1])


# Layers and weights ------------------------------------------------------------------------------


def in_pieces(model: Any, num_stages: int, *inputs: torch.Tensor) -> Any:
    layers = take_apart(copy.deepcopy(model))
    output: Any = inputs
    for piece in partition(parameter_costs(layers), num_stages):
        stage = build_stage(layers, [piece], device=CPU)
        output = stage(*(output if isinstance(output, tuple) else (output,)))
    return output


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("family", ["gpt", "gpt2", "llama"])
def test_stages_in_a_row_compute_what_the_model_computes(family: str, num_stages: int) -> None:
    model = tiny_gpt() if family == "gpt" else tiny_hf(family)
    x, _ = tokens()
    expected = model(x) if family == "gpt" else model(x, use_cache=False).logits
    assert torch.equal(in_pieces(model, num_stages, x), expected)


def test_eager_attention_of_hugging_face_keeps_its_mask() -> None:
    model = tiny_hf("llama")
    model.config._attn_implementation = "eager"
    x, _ = tokens()
    assert torch.equal(in_pieces(model, 2, x), model(x, use_cache=False).logits)


@pytest.mark.parametrize("family", ["gpt", "gpt2", "llama"])
def test_no_name_is_lost_or_new(family: str) -> None:
    model = tiny_gpt() if family == "gpt" else tiny_hf(family)
    layers = take_apart(model)
    names: list[str] = []
    for piece in partition(parameter_costs(layers), 3):
        names += build_stage(layers, [piece], device=CPU).state_dict()
    assert sorted(names) == sorted(model.state_dict())


@pytest.mark.parametrize("family", ["gpt", "gpt2", "llama"])
def test_a_model_on_meta_takes_memory_for_its_own_stage_alone(family: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        shape = tiny_gpt() if family == "gpt" else tiny_hf(family)
    model = tiny_gpt() if family == "gpt" else tiny_hf(family)
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "a.safetensors"
    )
    layers = take_apart(shape)
    cuts = partition(parameter_costs(layers), 2)
    stage = build_stage(layers, [cuts[1]], device=CPU, weights=tmp_path)
    whole = model.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in stage.state_dict().items())
    first = build_stage(layers, [cuts[0]], device=CPU)
    assert not any(t.is_meta for t in (*first.parameters(), *first.buffers()))
    hidden = first(tokens()[0])
    assert hidden.isfinite().all()
    if family == "llama":  # rotary tables, which no file holds
        real = build_stage(take_apart(model), [cuts[0]], device=CPU)
        for (name, table), (_, wanted) in zip(first.named_buffers(), real.named_buffers()):
            assert torch.equal(table, wanted), name


def test_new_weights_do_not_depend_on_the_number_of_stages() -> None:
    with torch.device("meta"):
        model = tiny_gpt()
    whole = build_stage(take_apart(model), [(0, 5)], device=CPU, seed=7).state_dict()
    for piece in [(0, 2), (2, 3), (3, 5)]:
        with torch.device("meta"):
            model = tiny_gpt()
        part = build_stage(take_apart(model), [piece], device=CPU, seed=7)
        assert all(torch.equal(value, whole[name]) for name, value in part.state_dict().items())
    assert abs(float(whole["blocks.0.mlp.0.weight"].std()) / 0.02 - 1) < 0.1


def test_functions_make_only_the_layers_of_a_stage() -> None:
    made = []

    def layer(number: int):
        def make() -> nn.Module:
            module = nn.Linear(2, 2)
            if not module.weight.is_meta:
                made.append(number)
            return module

        return make

    build_stage(take_apart([layer(i) for i in range(4)]), [(1, 3)], device=CPU)
    assert made == [1, 2]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: take_apart(nn.Linear(2, 2)),
            TypeError,
            "a pipeline takes nn.Sequential.*got Linear",
        ),
        (lambda: take_apart(cast("Any", [3])), TypeError, "layer 0 is a int; give a module"),
        (
            lambda: take_apart(cast("Any", [lambda: 3])),
            TypeError,
            "layer 0 is a function that returned int",
        ),
        (
            lambda: take_apart(nn.Sequential(nn.Linear(2, 2)), [("0.wieght", "0.bias")]),
            ValueError,
            "tied weight '0.wieght' is no parameter .did you mean '0.weight'",
        ),
        (
            lambda: take_apart(nn.Sequential(nn.Linear(2, 2)), [("0.weight", "0.bias")]),
            ValueError,
            "must have one shape, got",
        ),
        (
            lambda: build_stage(take_apart([Bare().to("meta")]), [(0, 1)], device=CPU),
            ValueError,
            "'0.scale' was on the meta device and got no values",
        ),
        (
            lambda: build_stage(
                take_apart([nn.Linear(2, 2)]),
                [(0, 1)],
                device=CPU,
                weights={"0.bias": torch.ones(2)},
            ),
            ValueError,
            "weights lack 1 of this stage's 2 tensors: 0.weight; give",
        ),
        (
            lambda: build_stage(
                take_apart([nn.Linear(2, 2)]),
                [(0, 1)],
                device=CPU,
                weights={"0.bias": torch.ones(3)},
            ),
            ValueError,
            r"weights hold '0.bias' as \(3,\), the model as \(2,\)",
        ),
        (
            lambda: build_stage(
                take_apart([nn.Linear(2, 2)]), [(0, 1)], device=CPU, weights="no-such-file"
            ),
            ValueError,
            "'no-such-file' is no safetensors file and no folder",
        ),
    ],
)
def test_what_cannot_be_cut_or_filled_is_refused(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


# Micro-batches -----------------------------------------------------------------------------------


def test_micro_batches_weigh_what_a_mean_over_the_batch_would_give() -> None:
    logits, target = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 5, (7,))
    target[[1, 4, 5]] = -100
    pieces = cut((logits, target), 3, "x")
    factors = weights([(t,) for _, t in pieces], "mean", None)
    total = sum(F.cross_entropy(x, t) * w for (x, t), w in zip(pieces, factors))
    torch.testing.assert_close(total, F.cross_entropy(logits, target))
    assert weights([(t,) for _, t in pieces], "sum", None) == [1.0, 1.0, 1.0]
    assert weights([(t,) for _, t in pieces], "mean", lambda t: len(t)) == [3 / 7, 2 / 7, 2 / 7]


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        (None, TypeError, "x must be a tensor with rows or a tuple of them, got NoneType"),
        ((), TypeError, "x must be a tensor with rows"),
        (torch.ones(3), ValueError, r"x has \[3\] rows for 4 micro-batches"),
        ((torch.ones(4), torch.ones(5)), ValueError, r"x has \[4, 5\] rows"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch, error, text) -> None:
    with pytest.raises(error, match=text):
        cut(batch, 4, "x")


def test_an_output_that_is_no_tensor_is_refused() -> None:
    assert len(as_tuple([torch.ones(1), torch.ones(1)])) == 2
    with pytest.raises(TypeError, match=r"must return a tensor or a tuple of tensors, got dict"):
        as_tuple({"a": 1})


# Runners in threads, over a network with delays ---------------------------------------------------


class TwoWays(nn.Module):
    """Takes and gives a tuple: values that need a gradient, and whole numbers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) + index.unsqueeze(1), index + 1


def run_threads(stages: list[nn.Module], batches: list[Batch], *, seed: int, timeout: float = 20.0):
    network = MemoryNetwork(len(stages), seed=seed, max_delay=0.003)
    results: list[Any] = [None] * len(stages)

    def work(stage: int) -> None:
        runner = Runner(stages[stage], network.transport(stage), in_flight=2, timeout=timeout)
        try:
            results[stage] = [runner.run(lambda: batches[stage]) for _ in range(2)]
        except Exception as error:
            results[stage] = error

    threads = [threading.Thread(target=work, args=(s,)) for s in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("seed", range(5))
def test_tuples_and_layers_that_work_in_place_give_the_gradients_of_one_process(seed: int) -> None:
    stages: list[nn.Module] = [TwoWays(), TwoWays(), TwoWays()]
    # The received tensor is changed in place, as a convolution's ReLU often does.
    stages[1].register_forward_pre_hook(lambda module, args: (args[0].relu_(), args[1]))
    whole = copy.deepcopy(stages)
    pieces = [(torch.randn(n, 4), torch.arange(n)) for n in (3, 3, 2)]

    def loss(number: int, output: Any) -> torch.Tensor:
        return (output[0] * output[1].unsqueeze(1)).square().sum()

    batches = [Batch(3, pieces), Batch(3), Batch(3, loss=loss)]
    results = run_threads(stages, batches, seed=seed)
    for _ in range(2):
        total = torch.zeros(())
        for number, piece in enumerate(pieces):
            output: Any = piece
            for stage in whole:
                output = stage(*output)
            value = loss(number, output)
            value.backward()
            total = value.detach() if number == 0 else total + value.detach()
    for losses in results:
        assert torch.equal(losses[1], total)
    for mine, theirs in zip(stages, whole):
        for param, wanted in zip(mine.parameters(), theirs.parameters()):
            assert torch.equal(param.grad, wanted.grad)


def test_without_training_nothing_gets_a_gradient() -> None:
    stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
    x = [(torch.ones(1, 4),)] * 3
    batches = [
        Batch(3, x, is_training=False),
        Batch(3, loss=lambda number, y: y.sum(), is_training=False),
    ]
    results = run_threads(stages, batches, seed=1)
    expected = 3 * stages[1](stages[0](x[0][0])).sum()
    assert all(torch.allclose(loss, expected) for losses in results for loss in losses)
    assert all(param.grad is None for stage in stages for param in stage.parameters())


def test_a_stage_that_falls_silent_is_named_by_all_others() -> None:
    network = MemoryNetwork(4, seed=0)
    errors: list[Any] = [None] * 4
    hangs = threading.Event()

    class Hangs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hangs.wait(5)
            return x

    def work(stage: int) -> None:
        module = Hangs() if stage == 2 else nn.Identity()
        runner = Runner(module, network.transport(stage), in_flight=2, timeout=0.4)
        inputs = [(torch.ones(1, requires_grad=False),)] * 4 if stage == 0 else None
        loss = (lambda number, y: y.sum()) if stage == 3 else None
        try:
            runner.run(lambda: Batch(4, inputs, loss, is_training=False))
        except samo.PeerError as error:
            errors[stage] = error
        if stage == 1:
            with pytest.raises(samo.PeerError, match="the pipeline ended with an earlier error"):
                runner.run(lambda: Batch(4))

    threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in range(4)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for stage in (0, 1, 3):
        threads[stage].join()
    assert time.monotonic() - begin < 3
    hangs.set()
    threads[2].join()
    for stage in (0, 1, 3):
        assert errors[stage].ranks == (2,)
        assert str(errors[stage]).startswith("rank 2 (stage 2 of 4) has been silent for")


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (Packet("activation", 3, 0, (torch.ones(1),), (False,)), "sent activation of batch 3 in batch 0"),
        (Packet("gradient", 0, 0), "sent gradient in the wrong direction"),
        (Packet("activation", 0, 1, (torch.ones(1),), (False,)), "sent activation 1 .* activation 0 was"),
        (Packet("abort", 0, origin=0, reason="OSError: disk"), r"rank 0 \(stage 0 of 2\) OSError: disk"),
    ],
)  # fmt: skip
def test_a_packet_out_of_place_names_its_sender(packet: Packet, text: str) -> None:
    network = MemoryNetwork(2)
    network.transport(0).send(1, packet)
    runner = Runner(nn.Identity(), network.transport(1), in_flight=1, timeout=5)
    with pytest.raises(samo.PeerError, match=text) as caught:
        runner.run(lambda: Batch(2, loss=lambda number, y: y.sum()))
    assert caught.value.ranks == (0,)


def test_gradients_that_do_not_fit_name_their_sender() -> None:
    network = MemoryNetwork(2)
    network.transport(1).send(0, Packet("gradient", 0, 0))
    runner = Runner(nn.Linear(1, 1), network.transport(0), in_flight=1, timeout=5)
    with pytest.raises(samo.PeerError, match="sent 0 gradients for 1 outputs of 0"):
        runner.run(lambda: Batch(1, [(torch.ones(1, 1),)]))


def test_a_neighbour_that_is_there_and_sends_nothing_is_given_up_in_the_end() -> None:
    network = MemoryNetwork(2)
    runner = Runner(nn.Identity(), network.transport(1), in_flight=1, timeout=0.1)
    is_done = threading.Event()

    def answer() -> None:
        other = network.transport(0)
        while not is_done.is_set():
            if other.receive(0.02) is not None:
                other.send(1, Packet("alive", 0))

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(samo.PeerError, match=r"is there, but has sent nothing for 0\.3"):
        runner.run(lambda: Batch(1, loss=lambda number, y: y.sum()))
    is_done.set()
    thread.join()
