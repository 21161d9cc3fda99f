"""samo bench step: contenders that train alike, and how their steps are run and recorded."""

import math
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import samo
from samo.bench import step
from samo.bench.contenders import CONTENDERS, Contender, Dense
from samo.bench.settings import Compile, StepConfig
from samo.bench.step import Contest, Round, model_flops, new_model
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


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_trains_and_holds_its_bytes(name: str) -> None:
    contender = built(name)
    loss = train(contender)
    account = contender.account()
    if account is None:
        assert isinstance(contender, Dense)
        held = contender.state_bytes() / sum(p.numel() for p in contender.model.parameters())
        expected = 20.0 + (0.129 * 0.72 if name == "masked" else 0)  # and counts of steps
        assert held == pytest.approx(expected, abs=0.02)
        for key, trained in contender.model.named_parameters():
            assert trained.dtype == torch.bfloat16
            assert torch.equal(trained, contender.masters[key].to(torch.bfloat16))
    else:
        assert account.measured_bytes == account.predicted_bytes
        assert contender.state_bytes() == account.measured_bytes + account.other_bytes
        assert (account.pruned.measured["dense"] == 0) == name.startswith("streamed")
    masks = samo.prune(new_model(SMALL, CPU), 0.9)
    for key, param in masks.parameters_of(contender.model).items():
        assert bool(param[~masks[key].to_bool()].any()) == (name == "dense")
        assert param[masks[key].to_bool()].any()
    if name != "dense":
        # bfloat16 gradients, and masters that start from bfloat16 weights: two digits agree.
        assert loss == pytest.approx(train(built("masked")), abs=0.01)


@pytest.fixture
def contest() -> Contest:
    tokens = torch.randint(0, SMALL.vocab_size, (2, SMALL.context + 1))
    return Contest(SMALL, StepConfig(), tokens, lambda _: None)


def test_a_contender_is_built_again_in_every_round(contest: Contest) -> None:
    for steps in (2, 1):
        contest.run("samo", steps)
    rounds = contest.rounds["samo"]
    assert [len(each.step_ms) for each in rounds] == [2, 1]
    assert [len(each.losses) for each in rounds] == [2, 1]
    assert contest.row("samo", {}).repeats == 3


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Contest:
    """A contest whose compiler does nothing."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    tokens = torch.randint(0, SMALL.vocab_size, (2, SMALL.context + 1))
    return Contest(SMALL, StepConfig(compile="blocks"), tokens, lambda _: None)


def test_contenders_take_turns_step_by_step(
    compiled: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    class Heard(Dense):
        def __init__(self, *args: Any, name: str) -> None:
            heard.append(f"build {name}")
            self.name = name
            super().__init__(*args)

        def update(self) -> None:
            heard.append(self.name)
            super().update()

    for name in ("dense", "masked"):
        monkeypatch.setitem(CONTENDERS, name, partial(Heard, name=name))
    assert compiled.run_in_turns(["dense", "masked"], 2)
    warm = ["dense"] * 2 + ["masked"] * 2
    first = ["build dense", *["dense"] * 3, "build masked", *["masked"] * 3, *warm]
    assert heard == [*first, *["dense", "masked"] * 6]  # two steps, and four in a row
    assert compiled.run_in_turns(["dense", "masked"], 1)
    assert heard[len(first) + 12 :] == [*warm, *["dense", "masked"] * 5]
    for rounds in compiled.rounds.values():
        assert [len(each.step_ms) for each in rounds] == [2, 1]
        assert rounds[0].losses[-1] > rounds[1].losses[-1]  # it went on
    assert compiled.row("dense", {}).figures["trained_steps"] == 3 + 2 + 2  # up to `final_loss`


def test_turns_are_compared_step_by_step(contest: Contest) -> None:
    def rounds(times: tuple[int, ...]) -> list[Round]:
        half = len(times) // 2
        return [
            Round(0, None, 1.0, list(part), [1.0], [1.0], [1.0], is_in_turns=True)
            for part in (times[:half], times[half:])
        ]

    contest.rounds["masked"], contest.rounds["samo"] = rounds((1, 9, 1, 9)), rounds((2, 9, 2, 18))
    assert contest.row("samo", {}).figures["over_masked"] == 2.0


def test_contenders_that_do_not_fit_together_are_built_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[object] = []

    class Large(Dense):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            is_alone = all(reference() is None for reference in alive)
            alive.append(weakref.ref(self))
            if not is_alone:
                raise RuntimeError("a compiler found no memory")

    for name in ("dense", "masked"):
        monkeypatch.setitem(CONTENDERS, name, Large)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    monkeypatch.setattr(step, "gpt_config", lambda *_: ("small", SMALL))
    config = StepConfig(only=("dense,masked",), compile="blocks", batch_size=2, repeats=2, rounds=2)
    said: list[str] = []
    rows = step.measure(config, CPU, lambda _: None, said.append)
    assert "not in turns: a compiler found no memory" in said
    assert [(row.failure, row.repeats) for row in rows] == [(None, 2), (None, 2)]


def test_a_contender_that_fails_is_not_tried_again(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    class Failing(Dense):
        def update(self) -> None:
            tried.append(1)
            if len(tried) > 4:  # a timed step
                raise RuntimeError("no kernel image\nfor this device")
            super().update()

    monkeypatch.setitem(CONTENDERS, "dense", Failing)
    for _ in range(2):
        contest.run("dense", 3)
    assert contest.row("dense", {}).failure == "no kernel image"
    assert len(tried) == 5


def test_repeats_are_shared_among_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, int]] = []
    monkeypatch.setattr(Contest, "run", lambda self, name, steps: heard.append((name, steps)))
    monkeypatch.setattr(step, "gpt_config", lambda *_: ("small", SMALL))
    config = StepConfig(only=("lean,samo",), repeats=5)
    rows = step.measure(config, CPU, lambda _: None, lambda _: None)
    assert heard == [(name, steps) for steps in (2, 2, 1) for name in ("samo", "lean")]
    assert [row.failure for row in rows] == ["not measured yet"] * 2


def test_more_rounds_than_repeats_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    monkeypatch.setattr(step, "gpt_config", lambda *_: ("small", SMALL))
    config = StepConfig(only=("masked,samo",), compile="blocks", batch_size=2, repeats=1, rounds=3)
    said: list[str] = []
    rows = step.measure(config, CPU, lambda _: None, said.append)
    assert [row.repeats for row in rows] == [1, 1]
    assert not [line for line in said if "not in turns" in line]


def test_rows_compare_within_rounds(contest: Contest) -> None:
    def rounds(times: tuple[int, ...], loss: float, peak: int) -> list[Round]:
        return [Round(0, None, 1.0, [ms], [1.0], [loss], [2.0 * ms], peak) for ms in times]

    contest.rounds["masked"] = rounds((1, 10, 100), 1.0, 50)
    contest.rounds["samo"] = rounds((2, 30, 300), math.inf, 10)
    found = contest.row("samo", {}).figures
    assert (found["over_masked"], found["peak_over_masked"]) == (3.0, 0.2)
    assert found["in_a_row_over_masked"] == 3.0
    assert found["tokens_per_s"] == pytest.approx(32 / 0.03, rel=1e-4)
    assert found["final_loss"] is None  # JSON has no infinity
    del contest.rounds["masked"]
    found = contest.row("samo", {}).figures
    assert (found["over_masked"], found["peak_over_masked"]) == (None, None)


def test_the_operations_of_a_step_are_those_of_its_matrices() -> None:
    shape = GPTConfig(num_layers=3, width=64, num_heads=2, context=32, vocab_size=500)
    layers = [module for module in GPT(shape).modules() if isinstance(module, nn.Linear)]
    weights = sum(layer.weight.numel() for layer in layers)
    attention = 3 * 2 * 2 * 32 * 64  # backward is twice; scores and mix; multiply and add
    assert model_flops(shape, 100) == 100 * (6 * weights + 3 * attention)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("blocks", ["_Block", "_Block"]),
        ("model", ["GPT"]),
        ("graphs", ["GPT", "reduce-overhead"]),
    ],
)
def test_models_are_compiled_and_reset_between_contenders(
    how: Compile, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []

    def compile_(self: nn.Module, *, fullgraph: bool, mode: str = "", options: Any = None) -> None:
        assert fullgraph
        heard.extend(filter(None, [type(self).__name__, mode]))

    monkeypatch.setattr(torch.compiler, "reset", lambda: heard.append("reset"))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: heard.append("begin"))
    monkeypatch.setattr(nn.Module, "compile", compile_)
    monkeypatch.setattr(step, "_QUICK", replace(SMALL, num_layers=2))
    config = StepConfig(quick=True, only=("masked", "samo"), compile=how, repeats=1)
    found = step.measure(config, CPU, lambda _: None, lambda _: None)
    # Five warm-up steps, one that is timed, one in a row.
    begins = ["begin"] * 7 if how == "graphs" else []
    assert heard == ["reset", *expected, *begins, "reset"] * 2
    for row in found:
        assert row.figures["compilations"] == 0
        assert row.figures.get("cudagraph_skips") == (0 if how == "graphs" else None)
