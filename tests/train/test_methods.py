"""Methods of pruning in whole runs: tickets that settle or not, masks that change, exact resumes."""

import multiprocessing
import random
import signal
import time
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
from samo.train import events, masking, starting
from samo.train.config import OptimConfig, PruneConfig, TrainConfig
from samo.train.learner import Learner
from samo.train.loop import resume, train
from tests.train.test_loop import Watcher, assert_same_run, lines, samo_config, small, text

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
    build = starting.new_learner

    def keep(*args: Any, **kwargs: Any) -> Any:
        learner["one"] = build(*args, **kwargs)
        return learner["one"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samo.train.loop.new_learner", keep)
        train(config_of(text, "settled"), tmp_path / "run", listeners=[Copy()])
    model = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32))
    bird = samo.EarlyBird(model, 0.9, queue=3, threshold=0.3)
    drawn = []
    for step, tensors in weights.items():
        model.load_state_dict(tensors)
        drawn.append(bird.observe(step))
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
    # RigL may grow what it has just dropped; SET replaces as many as the schedule says, or a few less.
    assert changes[-1]["dropped"] < changes[0]["dropped"]
    assert masks_file(run) == samo.load_masks(run / "checkpoints" / "last")
    assert {type(event) for event in watcher.seen} >= {events.Remapped}


def test_the_first_masks_of_moving_ones_are_random_before_training_and_the_largest_after(
    text: Path,
) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32))
    for dense_steps, method in ((0, "random"), (2, "magnitude")):
        prune = PruneConfig(method="set", dense_steps=dense_steps, scope="erk")
        config = starting.on_this_machine(replace(small(text), prune=prune))
        expected = samo.prune(model, 0.9, method=method, scope="erk")  # type: ignore[arg-type]
        learner = Learner(model, config.optim, dtype=torch.float32)
        assert masking.draw_masks(learner, config) == expected


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


def test_what_gradual_pruning_would_leave_empty_is_told_at_the_start(
    tmp_path: Path, text: Path
) -> None:
    prune = PruneConfig(method="gradual", sparsity=0.99999)
    with pytest.raises((ConfigError, samo.MaskError), match=r"keep"):
        train(replace(small(text), prune=prune), tmp_path / "run")
    assert not (tmp_path / "run").exists()


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
    for step in (2, 4, 6):
        run = tmp_path / f"stopped-{step}"
        stop = Watcher(step, lambda: signal.raise_signal(signal.SIGINT))
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
    stop = Watcher(5, lambda: signal.raise_signal(signal.SIGTERM))
    train(config, tmp_path / "stopped", listeners=[stop])
    resume(tmp_path / "stopped")
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_the_file_of_masks_goes_back_with_the_run(tmp_path: Path, text: Path) -> None:
    """Killed after a change that no checkpoint has, a run has the masks of its checkpoint again."""

    class CrashError(Exception):
        pass

    def crash() -> None:
        raise CrashError

    run = tmp_path / "run"
    config = config_of(text, "set", eval_every=100)
    with pytest.raises(CrashError):
        train(config, run, listeners=[Watcher(5, crash)])  # saved at 3, changed at 4
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
    monkeypatch.setattr(masking.Masking, "state_dict", lambda self: {})
    stop = Watcher(3, lambda: signal.raise_signal(signal.SIGTERM))
    train(config_of(text, name), run, listeners=[stop])
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"does not say how method .* stood: .*; take"):
        resume(run)


def test_a_run_killed_within_its_first_checkpoint_starts_again(tmp_path: Path, text: Path) -> None:
    train(config_of(text, "set"), tmp_path / "whole")
    run = tmp_path / "run"
    train(config_of(text, "set", save_every=100, eval_every=100), run)
    settings = samo_config(tmp_path / "whole")
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


def train_or_resume(text: Path, run: Path, name: str) -> None:
    """Do what somebody does who types the same command after every crash; runs in a process."""
    torch.set_num_threads(1)
    if (run / "run.json").exists():
        resume(run)
    else:
        train(config_of(text, name, steps=16, save_every=2, eval_every=5), run)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["settled", "gradual", "rigl"])
def test_a_run_killed_at_random_moments_and_resumed_equals_the_undisturbed_one(
    tmp_path: Path, text: Path, name: str
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["samo.train.loop", "samo.kernels.cpu"])

    def start(run: Path) -> "multiprocessing.context.ForkServerProcess":
        process = context.Process(target=train_or_resume, args=(text, run, name))
        process.start()
        return process

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = start(whole)
    undisturbed.join()
    assert undisturbed.exitcode == 0
    metrics = killed / "metrics.jsonl"
    draw = random.Random(7)
    kills = 0
    while True:
        process = start(killed)
        before = metrics.stat().st_size if metrics.exists() else 0
        wanted = 250 * draw.randint(0, 6)
        while process.is_alive() and (
            not metrics.exists() or abs(metrics.stat().st_size - before) < wanted
        ):
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.02))
        if kills < 5:
            process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    assert kills >= 3  # fewer would mean that it ran to its end before it was killed
    assert_same_run(whole, killed)
    assert masks_file(whole) == masks_file(killed)
