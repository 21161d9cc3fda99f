"""A samo.load that fails at any point leaves model, optimizer and scaler as they were."""

import itertools
import os
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import samo
from samo.checkpoint import load as loading
from samo.checkpoint.tensors import SavedTensors
from samo.core.weight import local_of
from samo.errors import CheckpointError
from tests.checkpoint.cases import Case, Layout, Run
from tests.checkpoint.test_ranks import build_rows, learn
from tests.checkpoint.test_save_load import (
    BF16,
    HALF,
    LEAN,
    OPTIMIZERS,
    Global,
    assert_same,
    compressed,
    net,
    state_of,
    step,
)
from tests.ranks import run_ranks
from tests.utils.system import failing_at


class InjectedError(Exception):
    pass


class Calls:
    """Counts calls of Python and C functions in a phase of a load, and fails at one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, phase: str, fail_at: int) -> None:
        self.count, self.fail_at = 0, fail_at
        act = getattr(loading._Load, phase)

        def profiled(*args: Any) -> None:
            sys.setprofile(self.on_event)
            try:
                act(*args)
            finally:
                sys.setprofile(None)

        patch.setattr(loading._Load, phase, profiled)

    def on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        # A lock whose __exit__ failed would be held for good, and hang threads of later tests.
        is_exit = event == "c_call" and arg.__name__ == "__exit__"
        if event in ("call", "c_call") and not is_exit:
            self.count += 1
            if self.count == self.fail_at:
                raise InjectedError  # which ends the profiling, too


CASES: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "compressed": ("samo.AdamW", BF16),
    "lean": ("lean", LEAN),
    "ages": ("ages", BF16),
    "scaler": ("SGD", HALF),
    "dense": ("AdamW fused", None),
    "dense from compressed": (None, BF16),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CASES)
def test_a_load_that_fails_at_any_call_changes_nothing(
    name: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, types = CASES[name]

    def build(seed: int) -> tuple[Any, Any, Any]:
        is_dense = types is None or (kind is None and seed == 1)
        model = net(seed) if is_dense else compressed(seed=seed, **(types or {}))
        opt = None if kind is None else OPTIMIZERS[kind](model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0 + seed) if types is HALF else None
        if opt is not None:
            step(model, opt, seed, scaler)
        return model, opt, scaler

    def state() -> list[Any]:
        dense = [module.weight.detach().clone() for module in (model.body, model.still)]
        found = state_of(model, *filter(None, [opt]))
        return [found, dense, None if scaler is None else scaler.state_dict()]

    model, opt, scaler = build(0)
    samo.save(tmp_path, model, opt, scaler=scaler)
    saved = state()
    model, opt, scaler = build(1)
    samo.load(tmp_path, net(1))  # compiles what expands it
    before = state()
    for phase, stride in (("check", 29), ("fill", every)):
        for number in range(1, 10_000, stride):
            with monkeypatch.context() as patch:
                calls = Calls(patch, phase, number)
                try:
                    samo.load(tmp_path, model, opt, scaler=scaler)
                except (InjectedError, CheckpointError):
                    torch.set_grad_enabled(True)  # it may have failed to leave torch.no_grad
                    assert_same(state(), before)
                    continue
            # Nothing failed, or Python ignored it, as in the destructor of a generator.
            if kind is not None:
                assert_same(state(), saved)
            model, opt, scaler = build(1)
            if calls.count < number:
                break
        assert number > 200


class Mutating(Global):
    """An optimizer that changes its state in place, and fails."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norm = 1.0
        self.param_groups[0]["lr"] = 7.0
        for content in self.state.values():
            content.clear()
        raise ValueError("an odd optimizer")


def test_an_optimizer_that_fails_half_way_is_restored(tmp_path: Path) -> None:
    model = net()
    opt = Mutating(model.parameters(), lr=0.1, momentum=0.9)
    step(model, opt, 0)
    samo.save(tmp_path, model, opt)
    step(model, opt, 1)
    before = state_of(model, opt)
    with pytest.raises(ValueError, match="an odd optimizer"):
        samo.load(tmp_path, model, opt)
    assert_same(state_of(model, opt), before)
    assert "norm" not in vars(opt)


# Ranks


def fail_on_a_rank(rank: int, num_ranks: int, folder: Path) -> int:
    """Let reads and copies fail on one rank; return after how many loads none failed any more."""
    os.fsync = lambda file: None  # type: ignore[assignment]
    run = Run(Case(torch.bfloat16), Layout(2, 2))
    rows = build_rows((4,))
    for number, (model, module, opt) in enumerate(
        (
            (run.pipeline, run.module, run.opt),
            (rows, rows, torch.optim.AdamW(rows.parameters(), lr=1e-2)),
        )
    ):
        train = run.train if model is run.pipeline else partial(learn, rows, opt, slice(None), 0)
        train(1)
        samo.save(folder / str(number), model, opt)
        train(2)
        before = state_of_rank(module, opt)
        for count, victim in zip(itertools.count(3, 14), itertools.cycle(range(num_ranks))):
            with pytest.MonkeyPatch.context() as patch:
                if rank == victim:
                    read = failing_at(count, OSError(5, "a broken disk"), SavedTensors.read)
                    patch.setattr(SavedTensors, "read", read)
                try:
                    samo.load(folder / str(number), model, opt)
                    break
                except (CheckpointError, OSError):
                    pass
                assert_same(state_of_rank(module, opt), before)
    run.pipeline.close()
    return count


def state_of_rank(model: nn.Module, opt: torch.optim.Optimizer) -> list[Any]:
    found = [*model.state_dict().values(), *(v for s in opt.state.values() for v in s.values())]
    return [local_of(tensor).clone() for tensor in found]


def test_what_fails_on_one_rank_is_undone_on_all(tmp_path: Path) -> None:
    counts = run_ranks(4, fail_on_a_rank, tmp_path)
    assert len({*counts}) == 1
    assert counts[0] > 3
