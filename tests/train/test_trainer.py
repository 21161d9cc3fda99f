"""The trainer: whole runs on a small text, refused and failed ones."""

import json
import math
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import samo
from samo.cli.train import _how_saved
from samo.data.batches import Batches
from samo.errors import CheckpointError, ConfigError, DataError, RunError
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig
from samo.train import events
from samo.train.config import with_values
from samo.train.gpt_subject import GPTSubject
from samo.train.learner import Learner
from samo.train.metrics import TensorBoard
from samo.train.trainer import Result, resume, train
from tests.core.twins import mask_
from tests.train.helpers import (
    Watcher,
    assert_same_run,
    clipped_step,
    interrupt_at,
    last_masks,
    lines,
    read_progress,
    recorded,
    small,
)


@pytest.mark.parametrize("mode", ["samo", "dense"])
def test_a_run_leaves_a_record_metrics_and_checkpoints(
    tmp_path: Path, text: Path, mode: str
) -> None:
    watcher = Watcher()
    result: Result = train(small(text, mode=mode), tmp_path / "run", listeners=[watcher])
    run = tmp_path / "run"
    assert (result.step, result.signal) == (8, None)
    record = json.loads((run / "run.json").read_text())
    assert record["config"]["run"]["mode"] == mode
    assert record["config"]["data"]["vocab_size"] == 256
    assert record["versions"]["torch"] == torch.__version__
    kinds = [line["event"] for line in lines(run)]
    assert kinds[0] == "start"
    assert kinds[-2:] == ["sample", "end"]
    assert [line["step"] for line in lines(run, "step")] == list(range(1, 9))
    evals = lines(run, "eval")
    assert [line["step"] for line in evals] == ([4, 8] if mode == "dense" else [3, 3, 4, 8])
    assert result.valid_loss == evals[-1]["valid_loss"]
    assert all(e["perplexity"] == pytest.approx(math.exp(e["valid_loss"])) for e in evals)
    phases = [line["phase"] for line in lines(run, "step")]
    assert phases == ["dense"] * 8 if mode == "dense" else ["dense"] * 3 + [mode] * 5
    assert (run / "checkpoints" / "best" / "manifest.json").exists()
    assert (result.ledger is not None) == (mode == "samo")
    assert recorded(run).run.compile is False
    if mode == "samo":
        others = {"resume", "layout", "observe", "remap", "traffic", "timeline"}
        expected = {kind for kind, name in events.NAMES.items() if name not in others}
        assert {type(event) for event in watcher.seen} == expected | {events.Ticked}


def test_a_run_is_dense_training_whose_pruned_weights_are_set_to_zero(
    tmp_path: Path, text: Path
) -> None:
    """A twin on dense state: torch's AdamW, and masks on gradients and weights."""
    folder = tmp_path / "run"
    # With a larger eps the bias of keys, whose gradient is rounding alone, is not thrown about by
    # it.
    train(small(text, lr=5e-3, eps=1e-5), folder)
    config, masks = recorded(folder), last_masks(folder)
    torch.manual_seed(0)
    twin = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32))
    groups = {
        name: {"params": [p], "scale": 1.0, "decay": 0.1 if p.dim() >= 2 else 0.0}
        for name, p in twin.named_parameters()
    }
    opt = torch.optim.AdamW([*groups.values()], betas=(0.9, 0.95), eps=1e-5)
    tokens = GPTSubject(config).open_text(folder).train
    batches = Batches(tokens, context=32, batch_size=2, seed=0)
    for step, line in enumerate(lines(folder, "step"), start=1):
        if step == 4:  # three steps were dense
            mask_(twin, masks)
            for group, (name, param) in zip(opt.param_groups, twin.named_parameters()):
                if name in masks:
                    for moment in ("exp_avg", "exp_avg_sq"):
                        masks[name].zero_(opt.state[param][moment])
                    group["scale"] = masks[name].numel / masks[name].kept
        inputs_BT, targets_BT, *_ = next(batches)
        for group in opt.param_groups:
            group["lr"] = group["scale"] * line["lr"]
            group["weight_decay"] = group["decay"] / group["scale"]
        loss = twin(inputs_BT, targets_BT)
        norm = clipped_step(twin, opt, loss)
        # What remains is the order in which norms and losses are summed.
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
    trained = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32))
    samo.load(folder / "checkpoints" / "last", trained)
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, twin.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_best_counts_only_what_is_pruned(tmp_path: Path, text: Path) -> None:
    """Dense weights may be better, but the run is for pruned ones; the first of these count too."""
    train(small(text, steps=12, eval_every=2, dense_steps=8), tmp_path / "run")
    after = [line for line in lines(tmp_path / "run", "eval") if line["step"] > 8]
    best = read_progress(tmp_path / "run", "best")
    assert best["best_loss"] == min(line["valid_loss"] for line in after)
    train(small(text, lr=0.0), tmp_path / "still")
    best = read_progress(tmp_path / "still", "best")
    assert (best["step"], best["phase"]) == (3, "samo")


def test_a_run_starts_from_the_weights_and_masks_of_another(tmp_path: Path, run: Path) -> None:
    source = run / "checkpoints" / "last"
    config = small(recorded(run).data.train[0], init=run, masks=run, dense_steps=0)
    second = tmp_path / "second"
    train(config, second, listeners=[interrupt_at(4)])
    assert lines(second, "prune")[0]["step"] == 0
    assert last_masks(second) == samo.load_masks(source)
    assert lines(second, "step")[0]["loss"] < lines(run, "step")[0]["loss"]
    source.rename(tmp_path / "gone")  # a resumed run does not need it
    assert resume(second).step == 8


# Refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dense_steps": 5, "skip": ("nothing.*",)}, "cannot prune: .*'nothing"),
        ({"pattern": "2:4", "scope": "erk"}, "which contradicts --scope erk"),
        ({"method": "gradual", "sparsity": 0.99999}, "would keep none of the wei"),
        ({"masks": Path("no-masks")}, "no-masks' does not exist; name a checkpoint, a run folder"),
        ({"batch_size": 2**30}, "TB for its dense phase, with 1,073,741,824 x 32 tokens, and this"),
        ({"device": "cuda"}, "--device cuda needs a GPU that torch can use"),
        ({"train": (Path("short.txt"),)}, "1 tokens are too few to hold back 33"),
        (
            {"train": (Path("short.txt"),), "valid": (Path("notes.txt"),)},
            r"to train on \('short.txt'\)",
        ),
        ({"valid": (Path("short.txt"),)}, r"the text to validate on \('short.txt'\)"),
        ({"data": 2}, "data=2 does not make up 1 rank.* start ranks with samo launch"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_a_folder_is_made(
    here: Path, text: Path, values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("short.txt").write_text("x")
    with pytest.raises((ConfigError, DataError, samo.MaskError), match=message):
        train(with_values(small(text), **values), Path("run"))
    assert not Path("run").exists()


# Checkpoints


def test_older_checkpoints_are_kept_and_can_be_resumed(
    tmp_path: Path, text: Path, finished: Path
) -> None:
    run = tmp_path / "run"
    train(recorded(finished, save_every=2, keep=3), run)
    kept = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert kept == ["step-4", "step-6", "step-8"]
    assert read_progress(run, "step-6")["step"] == 6
    resume(run / "checkpoints" / "step-4", listeners=[interrupt_at(5, signal.SIGUSR1)])
    kept = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert kept == ["step-4", "step-5"]  # later ones belong to steps that were dropped
    resume(run)
    assert_same_run(finished, run)


def test_checkpoints_are_written_after_minutes_and_while_training_continues(
    tmp_path: Path, finished: Path
) -> None:
    run = tmp_path / "run"
    train(recorded(finished, save_every=100, save_minutes=1e-9), run)
    saves = lines(run, "save")
    assert sorted({line["step"] for line in saves}) == [*range(1, 9)]
    assert all(0 < line["stall_s"] <= line["seconds"] for line in saves)
    assert any(line["stall_s"] < line["seconds"] for line in saves)


@pytest.mark.parametrize(("dense_steps", "save_every", "times"), [(3, 1, 1), (0, 8, 1), (0, 1, 0)])
def test_memory_for_copies_is_taken_once_before_the_first_save(
    tmp_path: Path, finished: Path, dense_steps: int, save_every: int, times: int
) -> None:
    config = recorded(finished, save_every=save_every, eval_every=8, dense_steps=dense_steps)
    with mock.patch("samo.train.saver.prepare") as prepare:
        train(config, tmp_path / "run")
    assert prepare.call_count == times


# Failures


def test_a_full_disk_ends_the_run_which_resumes(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, run = mock.Mock(side_effect=OSError(28, "No space left on device")), tmp_path / "run"
    fill = Watcher(2, lambda: monkeypatch.setattr("samo.checkpoint.save.write_tensors", full))
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(recorded(finished), run, listeners=[fill])
    assert lines(run, "end")[-1]["reason"] == "failed"
    monkeypatch.undo()
    resume(run)
    assert_same_run(finished, run)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_whose_folder_was_moved_ends_and_writes_to_no_other(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    # Its thread opens files by their path, and prints that this failed.
    monkeypatch.setattr("samo.train.metrics.is_installed", lambda name: False)

    def move() -> None:
        run.rename(moved)
        if is_replaced:
            run.mkdir()

    with pytest.raises(RunError, match=r"run' was moved or removed .*; resume the folder where"):
        train(recorded(finished), run, listeners=[Watcher(4, move)])
    assert not run.exists() or not [*run.iterdir()]
    assert lines(moved, "end")[-1]["reason"] == "failed"
    resume(moved)
    assert_same_run(finished, moved)


def test_a_display_or_a_board_that_cannot_write_is_left_out(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard = []

    class Broken:
        def on(self, event: events.Event) -> None:
            heard.append(event)
            raise OSError(5, "Input/output error")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoard, "on", full)
    assert train(small(text), tmp_path / "run", listeners=[Broken()]).step == 8
    assert len(heard) == 1
    assert "Broken gets no more events: [Errno 5] Input/output error" in caplog.text
    assert "TensorBoard gets no more events: [Errno 28] No space left on device" in caplog.text
    assert lines(tmp_path / "run", "end")[-1]["reason"] == "done"
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    (tmp_path / "run" / "tensorboard").touch()
    assert resume(tmp_path / "run").step == 8
    assert "TensorBoard gets no events: [Errno 17] File exists" in caplog.text


def test_an_interrupted_sample_is_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("samo.train.gpt_subject.stream", impatient)
    before = lines(run, "sample")
    assert resume(run).step == 8
    assert lines(run, "sample") == before
    assert lines(run, "end")[-1]["reason"] == "done"


def test_a_complete_run_is_saved_even_if_its_last_batch_has_no_finite_loss(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_loss, seen = Learner.whole_loss, list[float]()

    def last_is_nan(self: Learner, loss: Any) -> float:
        seen.append(whole_loss(self, loss))
        return math.nan if len(seen) == 8 else seen[-1]

    monkeypatch.setattr(Learner, "whole_loss", last_is_nan)
    result = train(small(text), tmp_path / "run")
    assert (result.step, result.saved_step) == (8, 8)
    assert read_progress(tmp_path / "run")["step"] == 8


def test_an_interrupted_run_whose_loss_is_not_finite_does_not_claim_a_checkpoint(
    tmp_path: Path, text: Path
) -> None:
    config = small(text, mode="dense", lr=1e30, warmup_steps=0, steps=30, eval_every=30)
    result = train(config, tmp_path / "run", listeners=[interrupt_at(10)])
    assert result.signal == signal.SIGTERM
    saved = [line["step"] for line in lines(tmp_path / "run", "save")]
    assert result.saved_step == (saved[-1] if saved else None) != result.step
    assert "not saved, since its loss is not finite; the" in _how_saved(result)


def test_lines_of_metrics_do_not_time_dense_and_pruned_steps_together(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = Learner.backward

    def slow(self: Learner, batches: Any) -> Any:
        time.sleep(0.5 if self.phase == "dense" else 0)
        return backward(self, batches)

    monkeypatch.setattr(Learner, "backward", slow)
    train(small(text, log_every=4), tmp_path / "run")
    first = lines(tmp_path / "run", "step")[0]
    assert (first["step"], first["phase"]) == (4, "samo")
    assert first["step_ms"] < 300


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 30, "mode": "dense", "lr": 1e30}, "no finite loss in 20 lines .* lower --lr"),
        ({"steps": 6, "mode": "dense", "lr": 1e30}, "its validation loss is nan; start a new one"),
        ({"dtype": "float16", "lr": 1e6}, "parameter .* which torch.float16 cannot represent; st"),
    ],
)
def test_a_diverged_run_ends_with_advice(
    tmp_path: Path, text: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=f"has diverged at .*: {message}"):
        train(small(text, warmup_steps=0, **values), tmp_path / "run")
    assert lines(tmp_path / "run", "end")[-1]["reason"] == "failed"
