"""Methods of pruning in whole runs: tickets, masks that change, exact resumes."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import samo
from samo.errors import CheckpointError, ConfigError
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig
from samo.pruning.schedules import cubic_sparsity
from samo.train import events, setup
from samo.train.config import OptimConfig, PruneConfig, TrainConfig
from samo.train.masking import Masking
from samo.train.resolve import resolve
from samo.train.step import Learner
from samo.train.trainer import resume, train
from tests.train.helpers import (
    CrashError,
    Watcher,
    assert_same_run,
    crash_at,
    interrupt_at,
    lines,
    recorded,
    small,
    text,
)

__all__ = ["text"]

METHODS: dict[str, PruneConfig] = {
    "settled": PruneConfig(
        method="early-bird", queue=3, mask_every=1, threshold=0.3, dense_steps=7
    ),
    "limit": PruneConfig(method="early-bird", queue=2, mask_every=2, threshold=0.0, dense_steps=5),
    "gradual": PruneConfig(method="gradual", dense_steps=2, mask_every=2, mask_stop=7),
    "set": PruneConfig(method="set", mask_every=2, mask_stop=7),
    "rigl": PruneConfig(method="rigl", mask_every=2, mask_stop=7),
    "rigl after a dense phase": PruneConfig(
        method="rigl", dense_steps=2, mask_every=2, mask_stop=8
    ),
}


def config_of(text: Path, name: str, **run: Any) -> TrainConfig:
    return replace(small(text, **run), prune=METHODS[name], optim=OptimConfig(lr=1e-3))


def masks_file(run: Path) -> samo.Masks:
    return samo.Masks.load(run / "masks.safetensors")


# Early-Bird


def test_a_ticket_that_settles_ends_the_dense_phase(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(config_of(text, "settled"), run)
    seen = lines(run, "observe")
    (pruned,) = lines(run, "prune")
    assert pruned["step"] == seen[-1]["step"] < 7
    assert (pruned["reason"], pruned["threshold"]) == ("settled", 0.3)
    assert pruned["distances"] == seen[-1]["distances"][-2:]
    assert max(pruned["distances"]) == seen[-1]["largest"] <= 0.3
    full = [line for line in seen[:-1] if len(line["distances"]) >= 2]
    assert all(line["largest"] > 0.3 for line in full)
    phases = [line["phase"] for line in lines(run, "step")]
    assert phases == ["dense"] * pruned["step"] + ["samo"] * (8 - pruned["step"])


def test_a_ticket_that_never_settles_is_drawn_at_the_limit(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(config_of(text, "limit"), run)
    assert [line["step"] for line in lines(run, "observe")] == [2, 4]
    (pruned,) = lines(run, "prune")
    assert (pruned["step"], pruned["reason"]) == (5, "limit")
    assert len(pruned["distances"]) == 1
    assert pruned["distances"][0] > pruned["threshold"] == 0.0


def test_with_history_every_mask_is_compared_with_all_before(tmp_path: Path, text: Path) -> None:
    config = config_of(text, "limit")
    train(replace(config, prune=replace(config.prune, mask_every=1)), tmp_path / "all")
    counts = [len(line["distances"]) for line in lines(tmp_path / "all", "observe")]
    assert counts == [0, 1, 2, 3, 4]
    queued = replace(config, prune=replace(config.prune, mask_every=1, history=False))
    train(queued, tmp_path / "queue")
    rows = [line["distances"] for line in lines(tmp_path / "queue", "observe")]
    assert rows == [line["distances"][-1:] for line in lines(tmp_path / "all", "observe")]
    assert masks_file(tmp_path / "all") == masks_file(tmp_path / "queue")


def test_early_bird_looks_after_the_warm_up_alone(tmp_path: Path, text: Path) -> None:
    config = config_of(text, "limit")
    config = replace(config, optim=OptimConfig(warmup_steps=3))
    train(replace(config, prune=replace(config.prune, mask_every=1)), tmp_path / "run")
    assert [line["step"] for line in lines(tmp_path / "run", "observe")] == [3, 4, 5]


def test_the_ticket_is_what_a_bird_of_the_library_draws(tmp_path: Path, text: Path) -> None:
    """The run is told again by hand: the same weights, looked at after the same steps."""
    weights: dict[int, dict[str, torch.Tensor]] = {}

    class Copy:
        def on(self, event: events.Event) -> None:
            if isinstance(event, events.Observed):
                model = learner["one"].model
                weights[event.step] = {n: p.detach().clone() for n, p in model.named_parameters()}

    learner: dict[str, Any] = {}
    build = setup.new_learner

    def keep(*args: Any, **kwargs: Any) -> Any:
        learner["one"] = build(*args, **kwargs)
        return learner["one"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "new_learner", keep)
        train(config_of(text, "settled"), tmp_path / "run", listeners=[Copy()])
    model = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32))
    bird = samo.EarlyBird(model, 0.9, queue=3, threshold=0.3)
    drawn = []
    for tensors in weights.values():
        model.load_state_dict(tensors)
        drawn.append(bird.observe())
    assert drawn[:-1] == [None] * (len(drawn) - 1)
    assert drawn[-1] == masks_file(tmp_path / "run")
    (pruned,) = lines(tmp_path / "run", "prune")
    assert pruned["distances"] == bird.distances[-1]


# Masks that change


def test_gradual_pruning_follows_the_cubic_schedule_from_the_dense_phase_on(
    tmp_path: Path, text: Path
) -> None:
    run = tmp_path / "run"
    train(config_of(text, "gradual"), run)
    (pruned,) = lines(run, "prune")
    assert (pruned["step"], pruned["sparsity"]) == (2, 0.0)
    changes = lines(run, "remap")
    assert [line["step"] for line in changes] == [4, 6, 7]
    for line in changes:
        expected = cubic_sparsity(line["step"] - 2, 0, 5, 0.0, 0.9)
        assert line["sparsity"] == pytest.approx(expected, abs=1e-3)
        assert line["grown"] == 0
    assert [line["dropped"] for line in changes] == [
        before["kept"] - after["kept"] for before, after in zip([pruned, *changes], changes)
    ]
    assert masks_file(run).kept == changes[-1]["kept"]


def test_the_state_shrinks_with_the_masks_and_is_accounted_for(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(config_of(text, "gradual"), run)
    states = [line for line in lines(run, "state") if line["paper_bytes"] is not None]
    assert [line["step"] for line in states] == [3, 5, 7, 8, 8]
    sizes = [line["measured_bytes"] for line in states]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] == sizes[4]
    assert sizes == [line["predicted_bytes"] for line in states]


def test_the_best_checkpoint_of_gradual_pruning_is_as_sparse_as_the_last(
    tmp_path: Path, text: Path
) -> None:
    config = replace(config_of(text, "gradual", steps=12, eval_every=1), optim=OptimConfig(lr=0.0))
    train(config, tmp_path / "run")
    best = samo.load_masks(tmp_path / "run" / "checkpoints" / "best")
    assert best == masks_file(tmp_path / "run")


@pytest.mark.parametrize("name", ["set", "rigl", "rigl after a dense phase"])
def test_moving_masks_stay_as_sparse_and_replace_ever_fewer(
    tmp_path: Path, text: Path, name: str
) -> None:
    run = tmp_path / "run"
    watcher = Watcher()
    train(config_of(text, name, steps=9), run, listeners=[watcher])
    (pruned,) = lines(run, "prune")
    changes = lines(run, "remap")
    assert len(changes) == (2 if name == "rigl after a dense phase" else 3)
    for line in changes:
        assert (line["kept"], line["numel"]) == (pruned["kept"], pruned["numel"])
        assert 0 < line["dropped"] == line["grown"] <= 0.3 * line["kept"]
    # RigL may grow what it has just dropped; SET replaces as many as the schedule says, or a few
    # less.
    assert changes[-1]["dropped"] < changes[0]["dropped"]
    assert masks_file(run) == samo.load_masks(run / "checkpoints" / "last")
    assert {type(event) for event in watcher.seen} >= {events.Remapped}


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"method": "set", "dense_steps": 0, "scope": "erk"}, "random"),
        ({"method": "set", "dense_steps": 2, "scope": "erk"}, "magnitude"),
        ({"scope": "erk"}, "magnitude"),
        ({"pattern": "1:4"}, "magnitude"),
    ],
    ids=str,
)
def test_the_first_masks_follow_the_settings(
    settings: dict[str, Any], method: Any, text: Path
) -> None:
    """Before training, moving masks are random: magnitudes carry no information then."""
    config = resolve(replace(small(text), prune=PruneConfig(**settings)))
    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32))
    choice = {key: settings[key] for key in ("scope", "pattern") if key in settings}
    expected = samo.prune(model, config.prune.sparsity, method=method, **choice)
    masking = Masking(config, Learner(model, config.optim, dtype=torch.float32))
    masking.check()
    assert masking.draw(0)[0] == expected
    assert expected.sparsity == pytest.approx(0.75 if "pattern" in settings else 0.9, abs=1e-3)


def test_masks_are_not_computed_before_they_are_drawn(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr("samo.train.masking.prune", lambda *a, **k: calls.append(k))
    config = resolve(small(text))
    model = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32))
    Masking(config, Learner(model, config.optim, dtype=torch.float32)).check()
    assert not calls


def test_moving_masks_start_from_given_ones(tmp_path: Path, text: Path) -> None:
    train(config_of(text, "set"), tmp_path / "first")
    source = tmp_path / "first" / "masks.safetensors"
    prune = PruneConfig(method="rigl", masks=source, mask_every=3)
    train(replace(small(text), prune=prune), tmp_path / "second")
    (pruned,) = lines(tmp_path / "second", "prune")
    assert (pruned["step"], pruned["reason"]) == (0, "masks")
    first = lines(tmp_path / "second", "remap")[0]
    assert (first["step"], first["kept"]) == (3, pruned["kept"])


def test_late_entries_have_counts_of_their_own(tmp_path: Path, text: Path) -> None:
    train(config_of(text, "set"), tmp_path / "run")
    last = lines(tmp_path / "run", "state")[-1]
    assert last["measured"]["ages"] == 2 * lines(tmp_path / "run", "prune")[0]["kept"]
    assert last["measured_bytes"] == last["predicted_bytes"]


@pytest.mark.parametrize("method", ["early-bird", "set"])
def test_patterns_that_match_nothing_are_told_at_the_start(
    tmp_path: Path, text: Path, method: str
) -> None:
    prune = PruneConfig(method=method, skip=("nothing.*",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cannot prune: .*'nothing"):
        train(replace(small(text, steps=30), prune=prune), tmp_path / "run")


# Stop and go on


@pytest.mark.parametrize("name", METHODS)
def test_a_run_of_any_method_stopped_and_resumed_equals_one_that_was_not(
    tmp_path: Path, text: Path, name: str
) -> None:
    config = config_of(text, name)
    train(config, tmp_path / "whole")
    for step in (2, 5):
        run = tmp_path / f"stopped-{step}"
        stop = interrupt_at(step, signal.SIGINT)
        assert train(config, run, listeners=[stop]).signal == signal.SIGINT
        resume(run)
        assert_same_run(tmp_path / "whole", run)
        assert masks_file(run) == masks_file(tmp_path / "whole")


@pytest.mark.parametrize(("name", "dtype"), [("settled", "bfloat16"), ("rigl", "float16")])
def test_sixteen_bits_and_micro_batches_go_on_exactly_too(
    tmp_path: Path, text: Path, name: str, dtype: str
) -> None:
    config = config_of(text, name, dtype=dtype, accumulate=2)
    train(config, tmp_path / "whole")
    stop = interrupt_at(5)
    train(config, tmp_path / "stopped", listeners=[stop])
    resume(tmp_path / "stopped")
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_the_file_of_masks_goes_back_with_the_run(tmp_path: Path, text: Path) -> None:
    """Killed after a change that no checkpoint has, a run has the masks of its checkpoint again."""

    run = tmp_path / "run"
    config = config_of(text, "set", eval_every=100)
    with pytest.raises(CrashError):
        train(config, run, listeners=[crash_at(5)])  # saved at 3, changed at 4
    checkpoint = samo.load_masks(run / "checkpoints" / "last")
    assert masks_file(run) != checkpoint
    found = []

    class Look:
        def on(self, event: events.Event) -> None:
            if isinstance(event, events.Stepped):
                found.append(masks_file(run))

    resume(run, listeners=[Look()])
    assert found[0] == checkpoint
    assert found[-1] != checkpoint


@pytest.mark.parametrize("name", ["set", "limit"])
def test_a_checkpoint_without_the_state_of_its_method_is_refused(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(Masking, "state_dict", lambda self: {})
    stop = interrupt_at(3)
    train(config_of(text, name), run, listeners=[stop])
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"does not hold the state of method .*: .*; use"):
        resume(run)


def test_a_run_killed_within_its_first_checkpoint_starts_again(tmp_path: Path, text: Path) -> None:
    train(config_of(text, "set"), tmp_path / "whole")
    run = tmp_path / "run"
    train(config_of(text, "set", save_every=100, eval_every=100), run)
    settings = recorded(tmp_path / "whole")
    (run / "run.json").write_text((tmp_path / "whole" / "run.json").read_text())
    for name in ("last", "best"):
        (run / "checkpoints" / name / "manifest.json").unlink()
    assert resume(run, config=settings).step == 8
    assert_same_run(tmp_path / "whole", run)


def test_a_last_checkpoint_that_is_damaged_is_not_taken_for_none(
    tmp_path: Path, text: Path
) -> None:
    run = tmp_path / "run"
    train(config_of(text, "set"), run)
    (run / "checkpoints" / "last" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="is not a checkpoint: there is no"):
        resume(run)
