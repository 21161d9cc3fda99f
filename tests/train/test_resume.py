"""Runs that are stopped, crash or are killed (SIGKILL) and resumed equal runs that were not."""

import multiprocessing
import os
import random
import shutil
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import samo
from samo.errors import CheckpointError, ConfigError, DataError, RunError
from samo.train import events, learner as stepping
from samo.train.config import with_values
from samo.train.masking import Masking
from samo.train.metrics import MetricsFile, TensorBoard
from samo.train.saver import Saver
from samo.train.trainer import resume, train
from tests.meters import ignores_dynamo
from tests.train.helpers import (
    CrashError,
    assert_same_run,
    crash_at,
    interrupt_at,
    lines,
    losses,
    method_config,
    read_progress,
    recorded,
    small,
    tensors,
)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("magnitude", {"accumulate": 2}),
        ("magnitude", {"dtype": "bfloat16"}),
        ("magnitude", {"dtype": "float16"}),
        ("dense", {"dtype": "bfloat16", "mode": "dense"}),
        ("settled", {"dtype": "bfloat16", "accumulate": 2}),
        ("limit", {}),
        ("gradual", {}),
        ("set", {}),
        ("rigl", {"dtype": "float16"}),
    ],
    ids=str,
)
def test_a_run_stopped_and_resumed_equals_one_that_was_not(
    tmp_path: Path, text: Path, method: str, settings: dict[str, Any]
) -> None:
    config = method_config(text, method, **settings)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(config, whole)
    result = train(config, stopped, listeners=[interrupt_at(2, signal.SIGINT)])
    assert (result.step, result.signal) == (2, signal.SIGINT)
    for step in (3, 5):
        result = resume(stopped, listeners=[interrupt_at(step)])
        assert (result.step, result.signal) == (step, signal.SIGTERM)
        assert lines(stopped, "end")[-1]["reason"] == "interrupted"
    resume(stopped)
    assert_same_run(whole, stopped)


def test_a_run_that_crashed_has_closed_its_files_and_resumes_from_its_last_checkpoint(
    tmp_path: Path, finished: Path
) -> None:
    for step in (1, 7):  # before the first checkpoint, too
        run = tmp_path / f"crashed-{step}"
        with ExitStack() as stack:
            closed = [
                stack.enter_context(
                    mock.patch.object(kind, "close", autospec=True, side_effect=kind.close)
                )
                for kind in (MetricsFile, TensorBoard)
            ]
            stack.enter_context(pytest.raises(CrashError))
            train(recorded(finished), run, listeners=[crash_at(step)])
        assert [close.call_count for close in closed] == [1, 1]
        assert lines(run, "end")[-1]["reason"] == "failed"
        resume(run)
        assert_same_run(finished, run)


def test_what_follows_from_a_checkpoint_is_done_after_a_kill_in_between(
    tmp_path: Path, text: Path
) -> None:
    config = small(text, steps=6, eval_every=2, save_every=1, keep=2)
    whole = train(config, tmp_path / "whole").folder
    follow_up = Saver.follow_up
    for step in (4, 6):  # and right at the end, where a resume has no step left to take
        run = tmp_path / f"killed-{step}"

        def fail(saver: Saver, step: int = step) -> None:
            if read_progress(saver.folder.path)["step"] == step:
                raise CrashError
            follow_up(saver)

        with mock.patch.object(Saver, "follow_up", fail), pytest.raises(CrashError):
            train(config, run)
        resume(run)
        assert_same_run(whole, run)
        names = [{p.name for p in (r / "checkpoints").iterdir()} for r in (whole, run)]
        assert names[0] == names[1] == {"last", "best", "step-5", "step-6"}


KILLED = {"magnitude": (16, 5), "settled": (12, 3), "rigl": (12, 3)}
"""Steps and kills, by method."""


def train_or_resume(text: Path, run: Path, method: str) -> None:
    """Do what a user does who types the same command after every crash; runs in a process."""
    torch.set_num_threads(1)
    if (run / "run.json").exists():
        resume(run)
    else:
        steps, _ = KILLED[method]
        train(method_config(text, method, steps=steps, save_every=2, eval_every=5), run)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", KILLED)
def test_a_run_killed_at_random_moments_and_resumed_equals_the_undisturbed_one(
    tmp_path: Path, text: Path, method: str
) -> None:
    _, num_kills = KILLED[method]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["samo.train.trainer", "samo.kernels.cpu", "torch.utils.tensorboard"]
    )

    def start(run: Path) -> "multiprocessing.context.ForkServerProcess":
        process = context.Process(target=train_or_resume, args=(text, run, method))
        process.start()
        return process

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = start(whole)
    metrics = killed / "metrics.jsonl"

    def grown(before: int) -> int:
        """Bytes of metrics since; a resume may drop some first."""
        return abs(metrics.stat().st_size - before) if metrics.exists() else 0

    draw = random.Random(5)
    kills, moments = 0, set()
    while True:
        process = start(killed)
        # Wait for a few lines, so that it gets somewhere at any speed; then a little, to hit any
        # moment.
        wanted = draw.randint(0, 6)
        before = metrics.stat().st_size if metrics.exists() else 0
        while process.is_alive() and grown(before) < 250 * wanted:
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.02))
        if kills < num_kills:
            process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        moments.add(metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
    assert kills >= num_kills // 2  # fewer would mean that it ended before it was killed
    assert len(moments) > num_kills // 4
    undisturbed.join()
    assert undisturbed.exitcode == 0
    assert_same_run(whole, killed)


def test_a_run_is_the_same_however_its_weights_are_held(tmp_path: Path, text: Path) -> None:
    config = small(text, dtype="bfloat16")
    one = tmp_path / "resident"
    train(config, one)
    copies = 35_776  # of unpruned parameters, in 16 bits; they stay
    half = copies + 6 * 32**2 * 2  # and half of the 12 * 32^2 weights that are pruned
    dense = []
    for held in ("streamed", half):
        run = tmp_path / str(held)
        train(with_values(config, weights=held), run, listeners=[interrupt_at(6)])
        assert recorded(run).run.weights == held
        dense.append(lines(run, "state")[-1]["measured"]["dense"])
        resume(run, config=recorded(run, weights="resident"))
        found = [line["weights"] for line in lines(run, "state")]
        assert found == [None, held, "resident", "resident"]
        ours, theirs = ([e for e in losses(r) if e["event"] != "state"] for r in (one, run))
        assert ours == theirs
        assert all(torch.equal(t, tensors(run)[key]) for key, t in tensors(one).items())
    dense.append(lines(one, "state")[-1]["measured"]["dense"])
    assert copies == dense[0] < dense[1] <= half < dense[2]


@pytest.mark.slow
@ignores_dynamo
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # nor does samo: dynamo does
def test_a_compiled_run_can_be_stopped_and_says_when_it_compiles(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Traced and taken apart as for Inductor, but computed as eager mode does, so that all is equal.
    monkeypatch.setattr(stepping, "BACKEND", "aot_eager")
    torch.compiler.reset()  # or code of the test before is taken
    config = method_config(text, "rigl")
    train(config, tmp_path / "eager")
    stop = interrupt_at(5)
    train(with_values(config, compile=True), tmp_path / "compiled", listeners=[stop])
    drawn = lines(tmp_path / "eager", "prune")[0]["step"]
    compiling = [event.step for event in stop.seen if isinstance(event, events.Compiling)]
    assert compiling == [0, drawn]
    resume(tmp_path / "compiled")
    assert recorded(tmp_path / "compiled").run.compile is True
    assert_same_run(tmp_path / "eager", tmp_path / "compiled")


def test_a_finished_run_only_ends_again_or_is_extended(run: Path) -> None:
    before, weights = lines(run), tensors(run)
    assert resume(run).step == 8
    assert lines(run)[: len(before)] == before
    assert all(torch.equal(tensor, tensors(run)[name]) for name, tensor in weights.items())
    with pytest.raises(ConfigError, match=r"has taken 8 steps already, more than the 5 asked for"):
        resume(run, config=recorded(run, steps=5))
    # Losses on other batches cannot be compared: the search for the best starts again.
    assert resume(run, config=recorded(run, steps=12, eval_batches=1)).step == 12
    assert [line["step"] for line in lines(run, "step")] == list(range(1, 13))
    assert read_progress(run, "best")["step"] > 8
    assert recorded(run).run.steps == 12


def test_losses_on_other_batches_are_not_compared_after_a_kill_either(run: Path) -> None:
    longer = recorded(run, steps=12, eval_batches=1, save_every=50, eval_every=50)
    with pytest.raises(CrashError):
        resume(run, config=longer, listeners=[crash_at(10)])
    resume(run)
    assert read_progress(run, "best")["step"] == 12


@pytest.mark.parametrize("keep", [1, 20])
def test_a_run_that_returns_to_an_older_checkpoint_forgets_a_later_best(
    tmp_path: Path, text: Path, keep: int
) -> None:
    config = small(text, lr=1e-2, eval_every=1, save_every=1, keep=20, dense_steps=0)
    run = train(config, tmp_path / "run").folder
    assert read_progress(run, "best")["step"] > 4
    if keep == 1:  # that of the older best is gone
        for step in (1, 2, 3):
            shutil.rmtree(run / "checkpoints" / f"step-{step}")
    resume(run / "checkpoints" / "step-4", config=recorded(run, steps=5, eval_every=20, keep=keep))
    best = read_progress(run, "best")["step"]
    assert best <= 5
    progress = read_progress(run)
    assert progress["best_step"] == best
    kept = {path.name for path in (run / "checkpoints").glob("step-*")}
    assert kept == (set() if keep == 1 else {f"step-{step}" for step in range(1, 6)})


def test_a_run_that_returns_to_its_best_keeps_whole_lines(run: Path) -> None:
    """Back at the best, then killed before its first save: the next resume starts there too."""
    best = read_progress(run, "best")["step"]
    longer = recorded(run, steps=best + 5, save_every=50, eval_every=50)
    with pytest.raises(CrashError):
        resume(run / "checkpoints" / "best", config=longer, listeners=[crash_at(best + 2)])
    resume(run, config=longer)
    assert [line["step"] for line in lines(run, "step")] == list(range(1, best + 6))


def test_a_run_killed_within_its_first_checkpoint_starts_again(run: Path, finished: Path) -> None:
    (run / "checkpoints" / "last" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="is not a checkpoint: there is no"):
        resume(run)  # a damaged one is not taken for none
    (run / "checkpoints" / "best" / "manifest.json").unlink()
    assert resume(run).step == 8
    assert_same_run(finished, run)


# Refused


def test_another_text_or_checkpoint_is_refused(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(small(text), run)
    moved = text.rename(tmp_path / "moved.txt")
    with pytest.raises(DataError, match=r"notes.txt.*samo train NEW-PLACE --resume"):
        resume(run)
    assert resume(run, config=recorded(run, train=(moved,))).step == 8
    moved.write_text(moved.read_text().replace("fox", "cat"))
    with pytest.raises(RunError, match=r"the text of .* has changed, and a run resumes with"):
        resume(run)
    moved.write_text(moved.read_text().replace("cat", "fox"))
    samo.save(run / "checkpoints" / "other", torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"was not saved by a run of samo"):
        resume(run / "checkpoints" / "other")
    train(small(moved, steps=4, width=64), tmp_path / "wide")
    shutil.rmtree(run / "checkpoints")
    os.rename(tmp_path / "wide" / "checkpoints", run / "checkpoints")
    message = r"'blocks.0.attention.out.bias' has shape .64,. in the checkpoint, .32,. in a GPTCon"
    with pytest.raises(CheckpointError, match=message):
        resume(run)


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", "abc"), ("position", -1), ("best_loss", "x"), ("phase", "foo"), ("step", 10**400)],
)
def test_a_checkpoint_with_impossible_progress_is_refused(
    run: Path, field: str, value: Any
) -> None:
    last = run / "checkpoints" / "last"
    extra = samo.checkpoint.read_manifest(last).extra
    progress = {**extra["progress"], field: value, "mood": "of a newer samo"}
    samo.save(last, torch.nn.Linear(2, 2), extra={**extra, "progress": progress})
    with pytest.raises(CheckpointError, match=f"is damaged: its {field} is"):
        resume(run)


@pytest.mark.parametrize("name", ["set", "limit"])
def test_a_checkpoint_without_the_state_of_its_method_is_refused(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(Masking, "state_dict", lambda self: {})
    train(method_config(text, name), run, listeners=[interrupt_at(3)])
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="its random state or masks are not valid"):
        resume(run)
