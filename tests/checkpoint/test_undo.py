"""A samo.load that fails at any point leaves model, optimizer and scaler as they were."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import samo
from samo.checkpoint import load as loading
from samo.errors import CheckpointError
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
