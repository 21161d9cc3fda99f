"""samo bench step: contenders that train alike, and how their steps are run and recorded."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import samo
from samo.bench import step
from samo.bench.contenders import CONTENDERS, Contender, Dense
from samo.bench.settings import Compile, StepConfig
from samo.bench.step import Contest, Record, model_flops, new_model
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig

CPU = torch.device("cpu")
SMALL = GPTConfig(
    num_layers=1, width=64, num_heads=2, context=16, vocab_size=128, is_checkpointed=True
)
TOKENS = torch.arange(32).view(2, 16)


def built(name: str) -> Contender:
    masks = samo.prune(new_model(SMALL, CPU), 0.9)
    return CONTENDERS[name](new_model(SMALL, CPU), masks)


def train(contender: Contender) -> float:
    contender.gradients(TOKENS, TOKENS)
    contender.update()
    contender.keep_masks()
    return float(contender.gradients(TOKENS, TOKENS))


# Contenders


def test_a_model_is_made_in_16_bits_and_alike_each_time() -> None:
    model, again = new_model(SMALL, CPU), new_model(SMALL, CPU)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_trains_and_holds_its_bytes(name: str) -> None:
    contender = built(name)
    loss = train(contender)
    account = contender.account()
    if account is None:
        held = contender.state_bytes() / sum(p.numel() for p in contender.model.parameters())
        expected = 20.0 + (0.129 * 0.72 if name == "masked" else 0)  # and counts of steps
        assert held == pytest.approx(expected, abs=0.02)
    else:
        assert account.measured_bytes == account.predicted_bytes
        assert contender.state_bytes() == account.measured_bytes + account.other_bytes
        streamed = account.pruned.measured["dense"] == 0
        assert streamed == name.startswith("streamed")
    masks = samo.prune(new_model(SMALL, CPU), 0.9)
    for key, param in masks.parameters_of(contender.model).items():
        pruned = param[~masks[key].to_bool()]
        assert bool(pruned.any()) == (name == "dense")
        assert param[masks[key].to_bool()].any()
    if name != "dense":
        # bfloat16 gradients, and masters that start from bfloat16 weights: two digits agree.
        assert loss == pytest.approx(train(built("masked")), abs=0.01)


def test_dense_training_steps_its_masters_and_keeps_their_masks() -> None:
    contender = built("masked")
    assert isinstance(contender, Dense)
    before = {name: master.detach().clone() for name, master in contender.masters.items()}
    contender.gradients(TOKENS, TOKENS)
    contender.update()
    contender.keep_masks()
    for name, param in contender.params.items():
        assert torch.equal(param, contender.masters[name].to(torch.bfloat16))
        assert not torch.equal(contender.masters[name], before[name])
        assert param.grad is None
        if name in contender.masks:
            assert not contender.masters[name][~contender.masks[name].to_bool()].any()


# Steps


@pytest.fixture
def contest() -> Contest:
    tokens = torch.randint(0, SMALL.vocab_size, (2, SMALL.context + 1))
    return Contest(SMALL, StepConfig(), tokens, lambda _: None)


def test_a_contender_is_built_again_in_every_round(contest: Contest) -> None:
    for steps in (2, 1):
        contest.run("samo", steps)
    record = contest.records["samo"]
    assert len(record.step_ms) == len(record.update_ms) == 3
    assert len(record.in_a_row_ms) == len(record.round_ms) == 2  # once in each round
    assert record.round_ms[1] == pytest.approx(record.step_ms[2], rel=1e-4)  # five digits
    assert len(record.losses) == 1  # of the last round
    assert record.state_bytes > 0
    assert record.warm_up_s > 0
    assert 0 < record.update_ms[0] < record.step_ms[0]


@pytest.mark.parametrize("update", [0, 4], ids=["warm-up", "timed step"])
def test_a_contender_that_fails_is_not_tried_again(
    update: int, contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    class Failing(Dense):
        def update(self) -> None:
            tried.append(1)
            if len(tried) > update:
                raise RuntimeError("no kernel image\nfor this device")
            super().update()

    monkeypatch.setitem(CONTENDERS, "dense", Failing)
    for _ in range(2):
        contest.run("dense", 3)
    assert contest.records["dense"].failure == "no kernel image"
    assert len(tried) == update + 1
    assert step._row("dense", contest, {}, 32, 1e9).failure == "no kernel image"


def test_repeats_are_shared_among_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, int]] = []
    monkeypatch.setattr(Contest, "run", lambda self, name, steps: heard.append((name, steps)))
    monkeypatch.setattr(step, "gpt_config", lambda *_: SMALL)
    config = StepConfig(only=("lean,samo",), repeats=5)
    rows = step.measure(config, CPU, lambda _: None, lambda _: None)
    assert heard == [(name, steps) for steps in (2, 2, 1) for name in ("samo", "lean")]
    assert [row.failure for row in rows] == ["not measured yet"] * 2
    heard.clear()
    config = replace(config, repeats=2, rounds=3)
    step.measure(config, CPU, lambda _: None, lambda _: None)
    assert [steps for _, steps in heard] == [1, 1, 1, 1]


def test_rows_compare_within_rounds(contest: Contest) -> None:
    common: dict[str, Any] = {"update_ms": [1.0], "in_a_row_ms": [1.0]}
    contest.records["masked"] = Record(
        step_ms=[1, 10, 100], round_ms=[1, 10, 100], losses=[1.0], peak_bytes=50, **common
    )
    contest.records["samo"] = Record(
        step_ms=[2, 30, 300], round_ms=[2, 30, 300], losses=[math.inf], peak_bytes=10, **common
    )
    found = step._row("samo", contest, {}, 60, 3e9).figures
    assert (found["over_masked"], found["peak_over_masked"]) == (3.0, 0.2)
    assert (found["tokens_per_s"], found["tflop_per_s"]) == (2000, 0.1)
    assert found["final_loss"] is None  # JSON has no infinity
    del contest.records["masked"]
    found = step._row("samo", contest, {}, 60, 3e9).figures
    assert (found["over_masked"], found["peak_over_masked"]) == (None, None)


@pytest.mark.parametrize(
    ("memory", "name"), [(141e9, "gpt3-2.7b"), (80e9, "gpt3-760m"), (24e9, "gpt3-125m")]
)
def test_the_default_shape_follows_from_the_memory(
    memory: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "hardware", lambda device: {"memory_bytes": memory})
    assert step.shape_name(StepConfig(), torch.device("cuda")) == name
    assert step.shape_name(StepConfig(shape="mini"), torch.device("cuda")) == "mini"


def test_the_operations_of_a_step_are_those_of_its_matrices() -> None:
    shape = GPTConfig(num_layers=3, width=64, num_heads=2, context=32, vocab_size=500)
    model = GPT(shape)
    weights = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    )
    attention = 3 * 2 * 2 * 32 * 64  # backward is twice; scores and mix; multiply and add
    assert model_flops(shape, 100) == 100 * (6 * weights + 3 * attention)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("blocks", [("_Block", {"fullgraph": True})] * 2),
        ("model", [("GPT", {"fullgraph": True})]),
        ("graphs", [("GPT", {"fullgraph": True, "mode": "reduce-overhead"})]),
    ],
)
def test_models_are_compiled_and_reset_between_contenders(
    how: Compile, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    compiler = torch.compiler
    monkeypatch.setattr(compiler, "reset", lambda: heard.append("reset"))
    monkeypatch.setattr(compiler, "cudagraph_mark_step_begin", lambda: heard.append("begin"))
    compile_: Callable[..., None] = lambda self, **options: heard.append(  # noqa: E731
        (type(self).__name__, options)
    )
    monkeypatch.setattr(nn.Module, "compile", compile_)
    monkeypatch.setattr(step, "_QUICK", replace(SMALL, num_layers=2))
    config = StepConfig(quick=True, only=("masked", "samo"), compile=how, repeats=1)
    found = step.measure(config, CPU, lambda _: None, lambda _: None)
    # Five warm-up steps, one that is timed, one in a row.
    begins = ["begin"] * 7 if how == "graphs" else []
    assert heard == ["reset", *expected, *begins, "reset"] * 2
    for row in found:
        assert row.parameters["rounds"] == 1
        assert row.figures["compilations"] == 0
        assert row.figures.get("cudagraph_skips") == (0 if how == "graphs" else None)
