"""The parts of samo bench: clock, rows, floors, contenders."""

import functools
import json
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import sparse_vs_dense
from torch import Tensor, nn

import samo
from samo.bench import compiling, contenders, kernels, rows, step, timing
from samo.bench.contenders import (
    MAKERS,
    Autocast,
    Contender,
    Dense,
    Lean,
    Masked,
    Samo,
    UnavailableError,
    held_bytes,
)
from samo.bench.kernels import Problem, floor_bytes, random_mask, with_linearity
from samo.bench.rows import Results, Row, Table
from samo.bench.settings import (
    CONTENDERS,
    BenchConfig,
    Compile,
    KernelsConfig,
    StepConfig,
    check,
    command_line,
    contenders as choose,
)
from samo.bench.step import Contest, model_flops, new_model
from samo.errors import ConfigError, RunError
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig

CPU = torch.device("cpu")
SMALL = GPTConfig(
    num_layers=1, width=64, num_heads=2, context=16, vocab_size=128, is_checkpointed=True
)


# Settings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BenchConfig(repeats=0), "repeats must be 1 or more, got 0"),
        (KernelsConfig(sizes=(26, 60)), "powers of 2 from 10 to 34, got 60; 30 stands for"),
        (KernelsConfig(densities=(0.1, 1.0)), "densities must lie between 0 and 1, got 1.0"),
        (KernelsConfig(densities=()), "no densities to measure"),
        (StepConfig(batch_size=0), "batch_size must be 1 or more, got 0"),
        (StepConfig(context=0), "context must be 1 or more"),
        (StepConfig(sparsity=1.0), "sparsity must lie between 0 and 1, got 1.0"),
        (StepConfig(only=("samo,flashoptm",)), "'flashoptm' is no contender .did you mean 'flash"),
        (StepConfig(sparsity=0.0), "sparsity must lie between 0 and 1, got 0.0"),
        (
            StepConfig(budgets=(0.5, 1.0)),
            "budgets must lie between 0 and 1, got 1.0; 0.5 keeps half",
        ),
        (StepConfig(rounds=0), "rounds must be 1 or more, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(config: BenchConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config)


@pytest.mark.parametrize("config", [KernelsConfig(), StepConfig()])
def test_the_default_settings_are_accepted(config: BenchConfig) -> None:
    check(config)


def test_the_command_line_says_what_is_not_as_usual() -> None:
    config = KernelsConfig(out=Path("a b"), sizes=(20, 22), large=True, repeats=9)
    assert (
        command_line(config) == "samo bench kernels --out 'a b' --repeats 9 --sizes 20 22 --large"
    )
    assert command_line(StepConfig(checkpointed=False)) == "samo bench step --no-checkpointed"


def test_every_contender_can_be_made_and_has_its_bytes() -> None:
    assert tuple(MAKERS) == CONTENDERS == tuple(contenders.BYTES)


@pytest.mark.parametrize(
    ("name", "cls", "weights"),
    [
        ("streamed", Samo, "streamed"),
        ("streamed-lean", Lean, "streamed"),
        ("budget-12.5%", Samo, 0.125),
        ("budget-75%-lean", Lean, 0.75),
    ],
)
def test_a_name_says_what_is_streamed(name: str, cls: type[Samo], weights: str | float) -> None:
    made = contenders.maker(name)
    assert isinstance(made, functools.partial)
    assert (made.func, made.keywords) == (cls, {"weights": weights})


def test_budgets_stand_behind_the_contenders_of_samo() -> None:
    chosen = choose(StepConfig(only=("flashoptim", "lean"), budgets=(0.25, 0.5)))
    budgets = ("budget-25%", "budget-50%", "budget-25%-lean", "budget-50%-lean")
    assert chosen == ("lean", *budgets, "flashoptim")


# The clock


def test_contenders_take_turns_and_are_prepared_each_time() -> None:
    heard: list[str] = []
    calls = {name: functools.partial(heard.append, name) for name in "abc"}
    times = timing.in_turns(calls, rounds=6, warm_up=1, prepare=lambda: heard.append("-"))
    assert {name: len(found) for name, found in times.items()} == {"a": 6, "b": 6, "c": 6}
    assert heard[::2] == ["-"] * 21
    turns = ["".join(heard[1::2][start : start + 3]) for start in range(0, 21, 3)]
    assert turns[0] == "abc"
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 2  # the order changes


def test_what_prepares_is_not_timed() -> None:
    times = timing.in_turns(
        {"nothing": lambda: None}, rounds=3, warm_up=0, prepare=lambda: time.sleep(0.05)
    )
    assert min(times["nothing"]) < 25


def test_a_ratio_is_taken_within_rounds() -> None:
    assert timing.ratio([1.0, 20.0, 300.0], [1.0, 10.0, 100.0]) == 2.0


def test_a_cpu_has_nothing_to_flush() -> None:
    assert timing.flusher(CPU)() is None


# Floors


@pytest.mark.parametrize(
    ("operation", "formula"),
    [
        ("copy", lambda n, z: 4 * n),
        ("compress", lambda n, z: 2 * n + n / 8 + 2 * z),
        ("compress, to fp32", lambda n, z: 2 * n + n / 8 + 4 * z),
        ("expand", lambda n, z: 2 * n + n / 8 + 4 * z),
        ("update, exact", lambda n, z: 2 * n + n / 8 + 26 * z),
        ("update, lean", lambda n, z: 2 * n + n / 8 + 12 * z),
        ("update, dense", lambda n, z: 40 * n),
    ],
)
def test_a_floor_is_its_formula(operation: str, formula: Callable[[int, int], float]) -> None:
    for numel, kept in ((2**20, 2**17), (2**32, 2**30), (2**14, 1)):
        assert floor_bytes(operation, numel, kept) == formula(numel, kept)


def test_the_floor_of_a_kernel_counts_the_tensors_it_touches() -> None:
    problem = Problem(2**14, 0.1, CPU)
    touched = [problem.source, problem.grad_Z, problem.mask.words]
    assert floor_bytes("compress", 2**14, problem.mask.kept) == sum(t.nbytes for t in touched)


def test_a_random_mask_has_its_density_and_is_the_same_each_time() -> None:
    mask = random_mask(2**21 + 7, 0.2, CPU)  # three pieces, the last of them short
    assert abs(mask.kept / mask.numel - 0.2) < 0.002
    assert mask == random_mask(2**21 + 7, 0.2, CPU)
    assert not torch.equal(mask.words[:100], mask.words[2**15 : 2**15 + 100])


def test_an_update_changes_the_kept_weights_alone() -> None:
    problem = Problem(2**12, 0.1, CPU)
    weight = problem.model.weight.detach()
    before = weight.clone()
    problem.calls()["update, exact"]()
    changed = weight != before
    assert changed.any()
    assert not changed[~problem.mask.to_bool()].any()


def test_the_dense_update_goes_from_the_gradient_to_the_weight() -> None:
    problem = Problem(2**12, 0.1, CPU)
    update = problem.dense_update()
    problem.target.fill_(7)
    update()
    assert (problem.target - problem.source).abs().max() < 0.01
    problem.source[0] = torch.nan
    update()
    assert problem.target.isnan().nonzero().tolist() == [[0]]


def test_what_does_not_fit_into_memory_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")

    monkeypatch.setattr(kernels, "Problem", refuse)
    found = kernels.measure(KernelsConfig(quick=True), CPU, lambda _: None, lambda _: None)
    assert {row.failure for row in found} == {"out of memory: CUDA out of memory"}


def test_a_dense_update_that_does_not_fit_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Problem) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    monkeypatch.setattr(Problem, "dense_update", refuse)
    config = KernelsConfig(sizes=(12,), densities=(0.1,), repeats=1)
    found = kernels.measure(config, CPU, lambda _: None, lambda _: None)
    measured = {row.name for row in found if row.failure is None}
    assert {"copy", "compress", "expand", "update, exact"} <= measured
    assert "update, dense" not in measured


def test_linearity_compares_with_the_largest_size_of_the_same_density() -> None:
    def row(numel: int, density: float, ms: float | None) -> Row:
        return Row(name="copy", parameters={"numel": numel, "density": density}, median=ms)

    found = with_linearity(
        [row(10, 0.1, 3.0), row(20, 0.1, 4.0), row(10, 0.2, 1.0), row(20, 0.2, None)]
    )
    assert [entry.figures.get("linear") for entry in found] == [1.5, 1.0, 1.0, None]


# Contenders


def built(maker: Callable[[nn.Module, samo.Masks], Contender]) -> Contender:
    masks = samo.prune(new_model(SMALL, CPU), 0.9)
    return maker(new_model(SMALL, CPU), masks)


def one_step(contender: Contender) -> None:
    tokens = torch.arange(32).view(2, 16)
    contender.gradients(tokens, tokens)
    contender.update()
    contender.keep_masks()


def test_a_model_is_made_in_16_bits_and_alike_each_time() -> None:
    model, again = new_model(SMALL, CPU), new_model(SMALL, CPU)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


@pytest.mark.parametrize(
    ("maker", "expected"), [(Dense, 20.0), (Autocast, 16.0), (Masked, 20.0 + 0.129 * 0.72)]
)
def test_a_dense_contender_holds_its_bytes(
    maker: Callable[[nn.Module, samo.Masks], Contender], expected: float
) -> None:
    contender = built(maker)
    one_step(contender)
    contender.gradients(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
    held = contender.state_bytes() / sum(p.numel() for p in contender.model.parameters())
    assert held == pytest.approx(expected, abs=0.02)  # step counts, and masks of small tensors


def test_samo_holds_what_its_ledger_says() -> None:
    contender = built(Samo)
    one_step(contender)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    contender.gradients(tokens, tokens)
    account = contender.account()
    assert account is not None
    assert account.measured_bytes == account.predicted_bytes
    assert contender.state_bytes() == account.measured_bytes + account.other_bytes


@pytest.mark.parametrize("maker", [Samo, Lean])
def test_a_budget_is_a_fraction_of_the_bytes_of_dense_weights(
    maker: type[Samo], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    account = built(maker).account()
    assert account is not None
    held = account.pruned.predicted["dense"] + account.unpruned.predicted["dense"]
    monkeypatch.setattr(contenders, "compress_", lambda *_, weights, **__: given.append(weights))
    built(functools.partial(maker, weights=0.5))
    assert given == [held // 2]


@pytest.mark.parametrize("maker", [Masked, Samo])
def test_pruned_weights_stay_0(maker: Callable[[nn.Module, samo.Masks], Contender]) -> None:
    contender = built(maker)
    one_step(contender)
    masks = samo.prune(new_model(SMALL, CPU), 0.9)
    for name, param in masks.parameters_of(contender.model).items():
        assert not param[~masks[name].to_bool()].any()
        assert param[masks[name].to_bool()].any()


def test_the_masters_of_pruned_weights_stay_0() -> None:
    contender = built(Masked)
    assert isinstance(contender, Masked)
    one_step(contender)
    names = [name for name, _ in contender.model.named_parameters()]
    for name, master in zip(names, contender._masters):
        if name in contender.masks:
            assert not master[~contender.masks[name].to_bool()].any()


def test_dense_training_is_not_pruned() -> None:
    contender = built(Dense)
    one_step(contender)
    assert all(param.count_nonzero() > 0.9 * param.numel() for param in contender._params[:2])  # type: ignore[attr-defined]


def test_dense_training_steps_its_masters() -> None:
    contender = built(Dense)
    assert isinstance(contender, Dense)
    before = [master.detach().clone() for master in contender._masters]
    one_step(contender)
    for param, master, old in zip(contender._params, contender._masters, before):
        assert torch.equal(param, master.to(torch.bfloat16))
        assert not torch.equal(master, old)
        assert param.grad is None


def test_samo_and_masked_training_learn_alike() -> None:
    losses = []
    tokens = torch.arange(32).view(2, 16)
    for maker in (Masked, Samo):
        contender = built(maker)
        for _ in range(3):
            one_step(contender)
        losses.append(float(contender.gradients(tokens, tokens)))
    # bfloat16 gradients, and masters that start from bfloat16 weights in both: two digits agree.
    assert losses[0] == pytest.approx(losses[1], abs=0.01)


@pytest.mark.parametrize(
    ("name", "module"), [("torchao", "torchao.optim"), ("bitsandbytes", "bitsandbytes.optim")]
)
def test_a_peer_trains_the_masked_weights(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def make(params: Any, **settings: Any) -> torch.optim.Optimizer:
        given.update(settings)
        return torch.optim.SGD(params, lr=1.0)

    monkeypatch.setitem(__import__("sys").modules, module, SimpleNamespace(AdamW8bit=make))
    contender = built(MAKERS[name])
    one_step(contender)
    assert given.items() >= contenders.SETTINGS.items()
    for key, mask in contender.masks.items():
        assert not contender.model.get_parameter(key)[~mask.to_bool()].any()


def test_a_peer_that_is_missing_says_so() -> None:
    with pytest.raises(UnavailableError, match=r"not installed \(No module named 'no_such_peer'"):
        contenders.peer("no_such_peer")


def test_flashoptim_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashoptim", SimpleNamespace())
    with pytest.raises(UnavailableError, match="FlashOptim needs an NVIDIA GPU"):
        built(MAKERS["flashoptim"])


def test_held_bytes_counts_each_storage_once_wherever_it_lies() -> None:
    layer = nn.Linear(10, 10, bias=False)
    state = {layer.weight: {"a": torch.zeros(5), "same": layer.weight.detach(), "n": 3}}
    state[layer.weight]["wrapped"] = SimpleNamespace(_data=torch.zeros(7), name="x")
    state[layer.weight]["list"] = [torch.zeros(2), (torch.zeros(1),)]
    optimizer = SimpleNamespace(state=state)
    assert held_bytes([layer], [optimizer], [None, torch.zeros(3)]) == 4 * (100 + 5 + 7 + 3 + 3)


def test_held_bytes_looks_into_tensor_subclasses() -> None:
    class Wrapped(Tensor):
        scales: Tensor

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["scales"], None

    outer = torch.zeros(100).as_subclass(Wrapped)
    outer.scales = torch.zeros(6)
    assert held_bytes([], [], [outer]) == 24


# Steps


def test_the_operations_of_a_step_are_those_of_its_matrices() -> None:
    shape = GPTConfig(num_layers=3, width=64, num_heads=2, context=32, vocab_size=500)
    model = GPT(shape)
    weights = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    )
    attention = 3 * 2 * 2 * 32 * 64  # backward is twice; scores and mix; multiply and add
    assert model_flops(shape, 100) == 100 * (6 * weights + 3 * attention)


@pytest.fixture
def contest() -> Contest:
    tokens = torch.randint(0, SMALL.vocab_size, (2, SMALL.context + 1))
    return Contest(SMALL, 0.9, tokens, CPU, lambda _: None)


def test_a_contender_alone_is_built_anew_in_every_round(contest: Contest) -> None:
    for steps in (2, 1):
        contest.alone("samo", steps)
    record = contest.records["samo"]
    assert len(record.step_ms) == len(record.update_ms) == 3
    assert len(record.in_a_row_ms) == 2  # once in each round
    assert len(record.losses) == 1  # since it was built last
    assert record.state_bytes > 0
    assert 0 < record.update_ms[0] < record.step_ms[0]


def test_a_contender_that_cannot_be_built_is_not_tried_again(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(*_: object) -> Contender:
        tried.append(1)
        raise RuntimeError("no kernel image\nfor this device")

    monkeypatch.setitem(MAKERS, "samo", refuse)
    contest.alone("samo", 2)
    contest.alone("samo", 2)
    assert contest.records["samo"].failure == "no kernel image"
    assert len(tried) == 1


def test_a_contender_that_fails_in_a_step_leaves_the_others(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Dense):
        count = 0

        def update(self) -> None:
            self.count += 1
            if self.count == 4:
                raise RuntimeError("it broke")
            super().update()

    monkeypatch.setitem(MAKERS, "dense", Failing)
    contest.together(["dense", "samo"], 3)
    assert contest.records["dense"].failure == "it broke"
    assert not contest.records["dense"].step_ms  # it takes no further turns
    assert contest.records["samo"].failure is None
    assert len(contest.records["samo"].step_ms) == 3


def test_steps_are_shared_out_among_rounds() -> None:
    assert step._portions(12, 3) == [4, 4, 4]
    assert step._portions(11, 3) == [4, 4, 3]
    assert step._portions(2, 3) == [1, 1]


def test_contenders_stand_beside_each_other_where_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "hardware", lambda device: {"memory_bytes": 140e9})
    device = torch.device("cuda")
    assert step._fits(["samo", "flashoptim"], 2_700_000_000, device)
    assert not step._fits(["dense", "masked", "samo"], 2_700_000_000, device)
    assert step._fits(CONTENDERS, 2_700_000_000, CPU)


@pytest.mark.parametrize(
    ("memory", "name"), [(141e9, "gpt3-2.7b"), (80e9, "gpt3-760m"), (24e9, "gpt3-125m")]
)
def test_the_usual_shape_follows_from_the_memory(
    memory: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "hardware", lambda device: {"memory_bytes": memory})
    assert step.shape_name(StepConfig(), torch.device("cuda")) == name
    assert step.shape_name(StepConfig(shape="mini"), torch.device("cuda")) == "mini"


def test_one_at_a_time_every_contender_gets_all_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "_fits", lambda *_: False)
    monkeypatch.setattr(step, "_QUICK", SMALL)
    saved: list[int] = []
    config = StepConfig(quick=True, only=("samo",))
    found = step.measure(config, CPU, lambda made: saved.append(len(made)), lambda _: None)
    assert [row.repeats for row in found] == [2]
    assert found[0].parameters["order"] == "one at a time in memory, 3 rounds"
    assert len(saved) == 2  # a step in each of two rounds, and none is left for the third


def test_rounds_are_compared_within_each(contest: Contest) -> None:
    contest.records["masked"] = step.Record(
        step_ms=[1, 10, 100], round_ms=[1, 10, 100], update_ms=[1], losses=[1], peak_bytes=50
    )
    contest.records["samo"] = step.Record(
        step_ms=[2, 30, 300], round_ms=[2, 30, 300], update_ms=[1], losses=[1], peak_bytes=10
    )
    found = step._row("samo", contest, {}, 32, 1e9).figures
    assert (found["over_masked"], found["peak_over_masked"]) == (3.0, 0.2)
    del contest.records["masked"]
    found = step._row("samo", contest, {}, 32, 1e9).figures
    assert (found["over_masked"], found["peak_over_masked"]) == (None, None)


def test_contenders_beside_each_other_are_built_anew_in_every_round(contest: Contest) -> None:
    for steps in (2, 1):
        contest.together(["masked", "samo"], steps)
    for record in contest.records.values():
        assert len(record.step_ms) == 3
        assert record.round_ms[1] == pytest.approx(record.step_ms[2], rel=1e-4)  # five digits
        assert record.warm_up_s > 0


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("none", []),
        ("blocks", [("_Block", {"fullgraph": True})] * 2),
        ("model", [("GPT", {"fullgraph": True})]),
        ("graphs", [("GPT", {"fullgraph": True, "mode": "reduce-overhead"})]),
    ],
)
def test_a_model_is_compiled_as_it_is_asked_for(
    how: Compile, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: found.append((type(self).__name__, options))
    )
    compiling.compile_(new_model(replace(SMALL, num_layers=2), CPU), how)
    assert found == expected


def test_what_is_compiled_is_forgotten_between_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(compiling.torch.compiler, "reset", lambda: heard.append("reset"))
    monkeypatch.setattr(
        compiling.torch.compiler, "cudagraph_mark_step_begin", lambda: heard.append("begin")
    )
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: heard.append("compile"))
    monkeypatch.setattr(step, "_QUICK", SMALL)
    config = StepConfig(quick=True, only=("masked", "samo"), compile="graphs", repeats=1)
    found = step.measure(config, CPU, lambda _: None, lambda _: None)
    # Each: five steps to warm up, one that is timed, one in a row.
    assert heard == ["reset", "compile", *["begin"] * 7, "reset"] * 2
    assert [row.parameters["order"] for row in found] == ["one at a time in memory"] * 2
    for row in found:
        assert (row.figures["compilations"], row.figures["cudagraph_skips"]) == (0, 0)
        assert (row.figures["trained_steps"], len(row.figures["round_ms"])) == (6, 1)


# Products


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(weight: Tensor, x_TD: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.zeros(x_TD.shape[0], weight.shape[0])

    monkeypatch.setitem(sparse_vs_dense.MAKERS, "csr", wrong)
    found = sparse_vs_dense.measure((64, 128), (64,), 0.9, CPU, 2, lambda _: None)
    reasons = {row.failure for row in found if row.name == "csr"}
    assert reasons == {"wrong result in torch.bfloat16: it is off by 1"}


def test_a_product_takes_the_first_type_that_works() -> None:
    def only_float32(weight: Tensor, x_TD: Tensor) -> Callable[[], Tensor]:
        if weight.dtype != torch.float32:
            raise RuntimeError(f"not for {weight.dtype}")
        return lambda: x_TD @ weight.t()

    weight, x_TD = torch.randn(8, 8), torch.randn(4, 8)
    assert sparse_vs_dense._prepare(only_float32, weight, x_TD)[1] == torch.float32


def test_the_reason_is_that_of_the_first_type() -> None:
    def never(weight: Tensor, x_TD: Tensor) -> Callable[[], Tensor]:
        raise RuntimeError(f"not for {weight.dtype}")

    with pytest.raises(RuntimeError, match=r"not for torch\.bfloat16"):
        sparse_vs_dense._prepare(never, torch.randn(8, 8), torch.randn(4, 8))


def test_blocks_are_whole_and_as_many_as_stay() -> None:
    weight = sparse_vs_dense.patterns(640, 0.9, CPU)["bsr 64"]
    blocks = weight.view(10, 64, 10, 64).count_nonzero(dim=(1, 3))
    assert sorted(set(blocks.flatten().tolist())) == [0, 64 * 64]
    assert int((blocks > 0).sum()) == 10


# Rows


def results(folder: Path) -> Results:
    return Results(
        folder,
        name="kernels",
        command="samo bench kernels",
        device=CPU,
        tabulate=lambda found: Table(("operation", "ms"), [(row.name, "1") for row in found]),
        notes=["It rains."],
    )


def test_rows_carry_where_and_when(tmp_path: Path) -> None:
    results(tmp_path).save([Row.timed("copy", {"numel": 8}, [1.0, 2.0, 3.0], {"kept": 4})])
    (line,) = (tmp_path / "rows.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (row["name"], row["median"], row["p20"], row["p80"]) == ("copy", 2.0, 1.0, 3.0)
    assert (row["repeats"], row["unit"], row["parameters"]) == (3, "ms", {"numel": 8})
    assert row["versions"]["torch"] == torch.__version__
    assert row["device_name"]
    assert row["date"].count("-") == 2


def test_the_page_names_what_was_not_measured(tmp_path: Path) -> None:
    missing = Row(name="torchao", parameters={}, failure="not installed")
    results(tmp_path / "new").save([missing])
    page = (tmp_path / "new" / "README.md").read_text()
    assert "- torchao: not installed" in page
    assert "    samo bench kernels\n" in page
    assert "- It rains." in page
    assert "![" not in page


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to .*file.*choose another folder with --out"):
        results(tmp_path / "file" / "out")


def test_reasons_are_told_once() -> None:
    found = [Row(name="2:4", parameters={"size": n}, failure="no GPU") for n in (1, 2)]
    assert rows.failures(found) == ["2:4: no GPU (2 times)"]


def test_an_installed_samo_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "samo"
    (package / "bench").mkdir(parents=True)
    monkeypatch.setattr(rows, "__file__", str(package / "bench" / "rows.py"))
    assert rows.commit() is None
    # Nor has one that lies in the repository of somebody else.
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    assert rows.commit() is None


def test_a_checkout_has_a_commit_and_says_if_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "samo"
    (package / "bench").mkdir(parents=True)
    (package / "file").write_text("a")
    monkeypatch.setattr(rows, "__file__", str(package / "bench" / "rows.py"))
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "ours"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    clean = rows.commit()
    assert clean is not None
    assert len(clean) >= 7
    (package / "file").write_text("b")
    assert rows.commit() == f"{clean}-dirty"


def test_a_loss_that_is_not_finite_is_no_number(contest: Contest) -> None:
    contest.records["dense"] = step.Record(step_ms=[1.0], update_ms=[0.5], losses=[math.inf])
    row = step._row("dense", contest, {}, 32, 1e9)
    assert row.figures["final_loss"] is None
    assert row.figures["tokens_per_s"] == 32_000
    assert row.figures["tflop_per_s"] == 1.0
