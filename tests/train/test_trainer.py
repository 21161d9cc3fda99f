"""The trainer: whole runs on a small text, stopped, resumed, refused."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import samo
from samo.data.batches import Batches
from samo.errors import CheckpointError, ConfigError, DataError, RunError
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig
from samo.train import checkpointing, compile as compiling, events, setup
from samo.train.config import OptimConfig, PruneConfig
from samo.train.metrics import Board
from samo.train.setup import open_text
from samo.train.trainer import Result, resume, train
from tests.meters import ignores_dynamo
from tests.train.helpers import (
    CrashError,
    Watcher,
    assert_same_run,
    crash_at,
    interrupt_at,
    lines,
    losses,
    recorded,
    small,
    tensors,
    text,
    write_text,
)

__all__ = ["text"]  # the fixture


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps, pruned after 3."""
    home = tmp_path_factory.mktemp("finished")
    return train(small(write_text(home)), home / "run").folder


@pytest.fixture
def run(tmp_path: Path, finished: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def read_progress(run: Path, checkpoint: str = "last") -> dict[str, Any]:
    found = samo.checkpoint.read_manifest(run / "checkpoints" / checkpoint)
    progress: dict[str, Any] = found.extra["progress"]
    return progress


# What a run does ----------------------------------------------------------------------------------


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
    assert (run / "masks.safetensors").exists() == (mode != "dense")
    assert (run / "checkpoints" / "best" / "manifest.json").exists()
    assert (result.ledger is not None) == (mode == "samo")
    assert recorded(run).run.compile is False
    if mode == "samo":
        others = {"resume", "save_failed", "observe", "remap", "traffic", "compile"}
        expected = {kind for kind, name in events.NAMES.items() if name not in others}
        assert {type(event) for event in watcher.seen} == expected | {events.Ticked}


def test_a_run_is_dense_training_whose_pruned_weights_are_set_to_zero(
    tmp_path: Path, text: Path
) -> None:
    """A twin on dense state: torch's AdamW, and masks on gradients and weights."""
    folder = tmp_path / "run"
    # With a larger eps the bias of keys, whose gradient is rounding alone, is not thrown about by
    # it.
    train(replace(small(text), optim=OptimConfig(lr=5e-3, eps=1e-5)), folder)
    config, masks = recorded(folder), samo.Masks.load(folder / "masks.safetensors")
    torch.manual_seed(0)
    twin = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32))
    groups = {
        name: {"params": [p], "scale": 1.0, "decay": 0.1 if p.dim() >= 2 else 0.0}
        for name, p in twin.named_parameters()
    }
    opt = torch.optim.AdamW([*groups.values()], betas=(0.9, 0.95), eps=1e-5)
    batches = Batches(open_text(config, folder).train, context=32, batch_size=2, seed=0)
    pruned = {}
    for step, line in enumerate(lines(folder, "step"), start=1):
        if step == 4:  # three steps were dense
            pruned = {name: ~mask.to_bool() for name, mask in masks.items()}
            for group, (name, param) in zip(opt.param_groups, twin.named_parameters()):
                if name in pruned:
                    param.data.masked_fill_(pruned[name], 0)
                    group["scale"] = masks[name].numel / masks[name].kept
        inputs_BT, targets_BT, _ = next(batches)
        loss = twin(inputs_BT, targets_BT)
        opt.zero_grad()
        loss.backward()
        for name, where in pruned.items():
            twin.get_parameter(name).grad.masked_fill_(where, 0)  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        for group in opt.param_groups:
            group["lr"] = group["scale"] * line["lr"]
            group["weight_decay"] = group["decay"] / group["scale"]
        opt.step()
        for name, where in pruned.items():
            twin.get_parameter(name).data.masked_fill_(where, 0)
        # What remains is the order in which norms and losses are summed.
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    trained = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32))
    samo.load(folder / "checkpoints" / "last", trained)
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, twin.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_training_learns(tmp_path: Path, text: Path) -> None:
    config = small(text, steps=40, eval_every=20, batch_size=8)
    train(replace(config, optim=OptimConfig(lr=5e-3)), tmp_path / "run")
    first, *_, last = (line["valid_loss"] for line in lines(tmp_path / "run", "eval"))
    assert last < first - 0.3


def test_two_runs_of_one_config_are_equal_and_another_seed_differs(
    tmp_path: Path, finished: Path
) -> None:
    text = finished.parent / "notes.txt"
    for name, seed in (("same", 0), ("other", 1)):
        train(small(text, seed=seed), tmp_path / name)
    assert_same_run(finished, tmp_path / "same")
    assert losses(finished) != losses(tmp_path / "other")


def test_best_counts_only_what_is_pruned(tmp_path: Path, text: Path) -> None:
    """Dense weights may be better, but the run is for pruned ones; the first of these count too."""
    config = small(text, steps=12, eval_every=2)
    train(replace(config, prune=PruneConfig(dense_steps=8)), tmp_path / "run")
    after = [line for line in lines(tmp_path / "run", "eval") if line["step"] > 8]
    best = read_progress(tmp_path / "run", "best")
    assert best["best_loss"] == min(line["valid_loss"] for line in after)
    train(replace(small(text), optim=OptimConfig(lr=0.0)), tmp_path / "still")
    best = read_progress(tmp_path / "still", "best")
    assert (best["step"], best["phase"]) == (3, "samo")


def test_a_run_starts_from_the_weights_and_masks_of_another(tmp_path: Path, run: Path) -> None:
    source = run / "checkpoints" / "last"
    config = small(recorded(run).data.train[0])
    config = replace(
        config, model=replace(config.model, init=source), prune=PruneConfig(masks=source)
    )
    second = tmp_path / "second"
    train(config, second, listeners=[interrupt_at(4)])
    assert lines(second, "prune")[0]["step"] == 0
    assert samo.Masks.load(second / "masks.safetensors") == samo.load_masks(source)
    assert lines(second, "step")[0]["loss"] < lines(run, "step")[0]["loss"]
    source.rename(tmp_path / "gone")  # a resumed run does not need it
    assert resume(second).step == 8


# Stopped and resumed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("samo", "float32"), ("samo", "bfloat16"), ("samo", "float16"), ("dense", "bfloat16")],
)
def test_a_run_stopped_anywhere_and_resumed_equals_one_that_was_not(
    tmp_path: Path, text: Path, mode: str, dtype: str
) -> None:
    config = small(text, mode=mode, dtype=dtype, accumulate=2)
    train(config, tmp_path / "whole")
    for step in (2, 3, 5):
        run = tmp_path / f"stopped-{step}"
        result = train(config, run, listeners=[interrupt_at(step)])
        assert (result.step, result.signal) == (step, signal.SIGTERM)
        assert lines(run, "end")[-1]["reason"] == "interrupted"
        resume(run)
        assert_same_run(tmp_path / "whole", run)


def test_a_run_that_crashed_resumes_from_its_last_checkpoint(
    tmp_path: Path, finished: Path
) -> None:
    for step in (1, 4, 7):  # before the first checkpoint, too
        run = tmp_path / f"crashed-{step}"
        with pytest.raises(CrashError):
            train(recorded(finished), run, listeners=[crash_at(step)])
        resume(run)
        assert_same_run(finished, run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_is_the_same_however_its_weights_are_held(
    tmp_path: Path, text: Path, dtype: str
) -> None:
    config = small(text, dtype=dtype)
    one = tmp_path / "resident"
    train(config, one)
    # With 16 bits unpruned parameters have copies too, which stay.
    copies = 35_776 if dtype == "bfloat16" else 0
    # And half of the 12 * 32^2 weights that are pruned.
    half = copies + 6 * 32**2 * (2 if dtype == "bfloat16" else 4)
    dense = []
    for held in ("streamed", half):
        run = tmp_path / str(held)
        train(
            replace(config, run=replace(config.run, weights=held)), run, listeners=[interrupt_at(6)]
        )
        assert recorded(run).run.weights == held
        dense.append(lines(run, "state")[-1]["measured"]["dense"])
        resume(run, config=recorded(run, weights="resident"))
        found = [line["weights"] for line in lines(run, "state")]
        assert found == [None, held, "resident", "resident"]
        for ours, theirs in zip(*map(without_state, (one, run)), strict=True):
            assert ours == theirs
        ours, theirs = tensors(one), tensors(run)
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
    dense.append(lines(one, "state")[-1]["measured"]["dense"])
    assert copies == dense[0] < dense[1] <= half < dense[2]


def without_state(run: Path) -> list[dict[str, Any]]:
    return [line for line in losses(run) if line["event"] != "state"]


@pytest.mark.slow
@ignores_dynamo
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # nor does samo: dynamo does
@pytest.mark.parametrize("method", ["early-bird", "rigl"])
def test_a_compiled_run_can_be_stopped_and_says_what_it_compiled(
    tmp_path: Path, text: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Traced and taken apart as for Inductor, but computed as eager mode does, so that all is equal.
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch.compiler.reset()  # or code of the test before is taken
    prune: dict[str, Any] = {"method": method, "dense_steps": 3}
    prune |= {"mask_every": 1, "queue": 2, "threshold": 0.5} if method == "early-bird" else {}
    prune |= {"mask_every": 2, "mask_stop": 7} if method in ("gradual", "rigl") else {}
    config = replace(small(text), prune=PruneConfig(**prune))
    train(config, tmp_path / "eager")
    fast = replace(config, run=replace(config.run, compile=True))
    stop = interrupt_at(5)
    train(fast, tmp_path / "compiled", listeners=[stop])
    assert any(isinstance(event, events.Compiling) and event.step == 0 for event in stop.seen)
    first, second = lines(tmp_path / "compiled", "compile")[:2]
    drawn = lines(tmp_path / "eager", "prune")[0]["step"]
    assert (first["step"], second["step"]) == (1, drawn + 1)
    assert 0 < first["seconds"] < 60
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


def test_a_run_that_returns_to_its_best_keeps_whole_lines(tmp_path: Path, text: Path) -> None:
    """Back at the best, then killed before its first save: the next resume starts from there too."""
    run = tmp_path / "run"
    train(small(text, steps=12, eval_every=5, save_every=50), run)
    best = read_progress(run, "best")["step"]
    longer = recorded(run, steps=20)
    with pytest.raises(CrashError):
        resume(run / "checkpoints" / "best", config=longer, listeners=[crash_at(best + 2)])
    resume(run, config=longer)
    assert [line["step"] for line in lines(run, "step")] == list(range(1, 21))


def test_another_text_or_checkpoint_is_refused(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(small(text), run)
    moved = text.rename(tmp_path / "moved.txt")
    with pytest.raises(DataError, match=r"notes.txt.*samo train NEW-PLACE --resume"):
        resume(run)
    config = recorded(run)
    assert resume(run, config=replace(config, data=replace(config.data, train=(moved,)))).step == 8
    moved.write_text(moved.read_text().replace("fox", "cat"))
    with pytest.raises(RunError, match=r"the text of .* has changed since it was trained on"):
        resume(run)
    moved.write_text(moved.read_text().replace("cat", "fox"))
    samo.save(run / "checkpoints" / "other", torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"was not saved by samo train"):
        resume(run / "checkpoints" / "other")
    wide = small(moved, steps=4)
    train(replace(wide, model=replace(wide.model, width=64)), tmp_path / "wide")
    shutil.rmtree(run / "checkpoints")
    os.rename(tmp_path / "wide" / "checkpoints", run / "checkpoints")
    with pytest.raises(
        (CheckpointError, samo.MaskError),
        match=r"'blocks.0.attention.out.weight' has shape .64, 64. but",
    ):
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
    progress = {**extra["progress"], field: value}
    samo.save(last, torch.nn.Linear(2, 2), extra={**extra, "progress": progress})
    with pytest.raises(CheckpointError, match=f"is damaged: its {field} is"):
        resume(run)


def test_progress_that_a_newer_samo_has_added_is_ignored(tmp_path: Path) -> None:
    found = checkpointing._progress(tmp_path, {"step": 3, "mood": "good"})
    assert found == checkpointing.Progress(step=3)


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"prune": PruneConfig(dense_steps=5, skip=("nothing.*",))}, "cannot prune: .*'nothing"),
        ({"prune": PruneConfig(method="gradual", sparsity=0.99999)}, "would keep none of the weights"),
        ({"prune": PruneConfig(masks=Path("no-masks"))}, "mask file '.*no-masks' does not exist"),
        ({"run": {"device": "cuda"}}, "--device cuda needs a GPU that torch can use"),
        ({"data": {"train": "short.txt"}}, "1 tokens are too few to hold back 33"),
        ({"data": {"train": "short.txt", "valid": "notes.txt"}}, r"to train on \('short.txt'\)"),
        ({"data": {"valid": "short.txt"}}, r"the text to validate on \('short.txt'\)"),
        ({"mesh": {"data": 2}}, "data=2 does not make up 1 rank.* start ranks with samo launch"),
        ({"mesh": {"pipe": 2}}, "pipe=2 does not make up 1 rank"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_work_is_refused_before_a_folder_is_made(
    tmp_path: Path,
    text: Path,
    sections: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "short.txt").write_text("x")
    config = small(text)
    for name, change in sections.items():
        if isinstance(change, dict):
            paths = {k: (tmp_path / v,) for k, v in change.items() if name == "data"}
            change = replace(getattr(config, name), **(paths or change))
        config = replace(config, **{name: change})
    with pytest.raises((ConfigError, DataError, samo.MaskError), match=message):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Failures -----------------------------------------------------------------------------------------


def no_room(*args: object, **kwargs: object) -> None:
    raise CheckpointError("'last' could not be written: No space left on device")


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_or_not(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    run, config = tmp_path / "run", recorded(finished, save_errors=on_error)
    fill = Watcher(4, lambda: monkeypatch.setattr(checkpointing, "save", no_room))
    if on_error == "stop":
        with pytest.raises(CheckpointError, match=r"No space left on device"):
            train(config, run, listeners=[fill])
        assert lines(run, "end")[-1]["reason"] == "failed"
        monkeypatch.undo()
        resume(run)
        assert_same_run(finished, run)
        return
    assert train(config, run, listeners=[fill]).step == 8
    failures = lines(run, "save_failed")
    assert [line["step"] for line in failures] == [4, 6, 8]
    assert "No space left on device" in failures[0]["reason"]
    assert read_progress(run)["step"] == 3


def test_masks_that_cannot_be_written_end_the_run_or_not(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(masks: samo.Masks, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(samo.Masks, "save", full)
    with pytest.raises(RunError, match=r"cannot write the masks to .*: No space left on device; "):
        train(small(text), tmp_path / "stopped")
    assert train(small(text, save_errors="continue"), tmp_path / "run").step == 8
    assert "cannot write the masks" in lines(tmp_path / "run", "save_failed")[0]["reason"]


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

    monkeypatch.setattr(Board, "on", full)
    monkeypatch.setattr(Board, "close", full)
    assert train(small(text), tmp_path / "run", listeners=[Broken()]).step == 8
    assert len(heard) == 1
    assert "broken is left out: [Errno 5] Input/output error" in caplog.text
    assert "board is left out: [Errno 28] No space left on device" in caplog.text
    assert lines(tmp_path / "run", "end")[-1]["reason"] == "done"


def test_an_interrupted_sample_is_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("samo.train.trainer.generate", impatient)
    result = resume(run)
    assert (result.step, result.sample) == (8, None)
    assert lines(run, "end")[-1]["reason"] == "done"


def test_a_diverged_run_ends_with_advice(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(text, steps=30, mode="dense")
    models: list[torch.nn.Module] = []

    def build(shape: GPTConfig) -> GPT:
        models.append(GPT(shape))
        return models[-1]  # type: ignore[return-value]

    monkeypatch.setattr(setup, "GPT", build)

    def poison() -> None:
        with torch.no_grad():
            models[-1].embed.weight.fill_(float("nan"))

    with pytest.raises(RunError, match=r"the loss has not been finite for 20 lines .* lower --lr"):
        train(config, tmp_path / "run", listeners=[Watcher(3, poison)])
    assert lines(tmp_path / "run", "end")[-1]["reason"] == "failed"
    assert lines(tmp_path / "run", "step")[-1]["loss"] is None
