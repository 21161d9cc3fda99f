"""The training loop: whole runs on a small text, interrupted, resumed, refused."""

import json
import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import samo
from samo.data.batches import Batches
from samo.errors import CheckpointError, ConfigError, DataError, RunError
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig
from samo.train import compiling, events, masking, starting
from samo.train.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PruneConfig,
    RunConfig,
    TrainConfig,
)
from samo.train.events import Event
from samo.train.folder import RunFolder
from samo.train.learner import Learner
from samo.train.loop import Result, resume, train
from samo.train.text import open_text
from tests.meters import ignores_dynamo

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "it",
    "rains",
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw = random.Random(0)
    path = tmp_path / "notes.txt"
    path.write_text("\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(300)))
    return path


def small(text: Path, **run: Any) -> TrainConfig:
    settings = {"steps": 8, "batch_size": 2, "eval_every": 4, "eval_batches": 2, "save_every": 3}
    return TrainConfig(
        data=DataConfig(train=(text,)),
        model=ModelConfig(num_layers=1, width=32, num_heads=2, context=32),
        prune=PruneConfig(dense_steps=0 if run.get("mode") == "dense" else 3),
        run=RunConfig(**{**settings, "log_every": 1, "sample_tokens": 5, **run}),
    )


def lines(run: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if not kinds or line["event"] in kinds]


CLOCKED = {"tokens_per_s", "step_ms", "memory_bytes", "elapsed_s"}


def losses(run: Path) -> list[dict[str, Any]]:
    """Return what a run measured of its model, without what it measured of the clock."""
    return [
        {key: value for key, value in line.items() if key not in CLOCKED}
        for line in lines(run, "step", "eval", "observe", "prune", "remap", "state", "sample")
    ]


def weights(run: Path, checkpoint: str = "last") -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint."""
    tensors = {}
    for file in sorted((run / "checkpoints" / checkpoint).glob("data-*/*.safetensors")):
        tensors.update({f"{file.name}:{name}": t for name, t in load_file(file).items()})
    return tensors


def assert_same_run(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    for name in ("last", "best"):
        ours, theirs = weights(one, name), weights(other, name)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert torch.equal(tensor, theirs[key]), key


class Watcher:
    """Listens, and does something at a step."""

    def __init__(self, step: int = 0, action: Callable[[], None] | None = None) -> None:
        self.seen: list[Event] = []
        self.step = step
        self.action = action

    def on(self, event: Event) -> None:
        self.seen.append(event)
        if isinstance(event, events.Ticked) and event.step == self.step and self.action:
            self.action()


@pytest.mark.parametrize("mode", ["samo", "dense"])
def test_a_run_leaves_a_record_metrics_and_checkpoints(
    tmp_path: Path, text: Path, mode: str
) -> None:
    result = train(small(text, mode=mode), tmp_path / "run")
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
    assert [line["step"] for line in lines(run, "eval")] == (
        [4, 8] if mode == "dense" else [3, 3, 4, 8]
    )
    assert result.valid_loss == lines(run, "eval")[-1]["valid_loss"]
    phases = [line["phase"] for line in lines(run, "step")]
    assert phases == ["dense"] * 8 if mode == "dense" else ["dense"] * 3 + [mode] * 5
    assert (run / "masks.safetensors").exists() == (mode != "dense")
    assert (run / "checkpoints" / "best" / "manifest.json").exists()
    assert (result.ledger is not None) == (mode == "samo")


def test_a_run_is_dense_training_whose_pruned_weights_are_set_to_zero(
    tmp_path: Path, text: Path
) -> None:
    """A twin on dense state: torch's AdamW, and masks on gradients and weights."""
    folder = tmp_path / "run"
    # With a larger eps the bias of keys, whose gradient is rounding alone, is not thrown about by it.
    train(replace(small(text), optim=OptimConfig(lr=5e-3, eps=1e-5)), folder)
    config, masks = RunFolder.find(folder).config(), samo.Masks.load(folder / "masks.safetensors")
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


def test_perplexity_is_e_to_the_loss(tmp_path: Path, text: Path) -> None:
    train(small(text), tmp_path / "run")
    for line in lines(tmp_path / "run", "eval"):
        assert line["perplexity"] == pytest.approx(math.exp(line["valid_loss"]))


def test_training_learns(tmp_path: Path, text: Path) -> None:
    config = small(text, steps=60, eval_every=20, batch_size=8)
    train(replace(config, optim=OptimConfig(lr=5e-3)), tmp_path / "run")
    first, *_, last = (line["valid_loss"] for line in lines(tmp_path / "run", "eval"))
    assert last < first - 0.3


def test_two_runs_of_one_config_are_equal_and_another_seed_differs(
    tmp_path: Path, text: Path
) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(small(text, seed=seed), tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["samo", "dense"])
def test_a_run_stopped_anywhere_and_resumed_equals_one_that_was_not(
    tmp_path: Path, text: Path, mode: str, dtype: str
) -> None:
    config = small(text, mode=mode, dtype=dtype, accumulate=2)
    train(config, tmp_path / "whole")
    for step in (2, 3, 5):
        run = tmp_path / f"stopped-{step}"
        stop = Watcher(step, lambda: signal.raise_signal(signal.SIGTERM))
        result = train(config, run, listeners=[stop])
        assert (result.step, result.signal) == (step, signal.SIGTERM)
        assert lines(run, "end")[-1]["reason"] == "interrupted"
        resume(run)
        assert_same_run(tmp_path / "whole", run)


@pytest.mark.slow
@ignores_dynamo
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # nor does samo: dynamo does
@pytest.mark.parametrize("method", ["early-bird", "gradual", "rigl"])
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
    stop = Watcher(5, lambda: signal.raise_signal(signal.SIGTERM))
    train(fast, tmp_path / "compiled", listeners=[stop])
    assert any(isinstance(event, events.Compiling) and event.step == 0 for event in stop.seen)
    first, second = lines(tmp_path / "compiled", "compile")[:2]
    drawn = lines(tmp_path / "eager", "prune")[0]["step"]
    assert (first["step"], second["step"]) == (1, drawn + 1)
    assert 0 < first["seconds"] < 60
    resume(tmp_path / "compiled")
    assert samo_config(tmp_path / "compiled").run.compile is True
    assert_same_run(tmp_path / "eager", tmp_path / "compiled")


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
        stop = Watcher(6, lambda: signal.raise_signal(signal.SIGTERM))
        train(replace(config, run=replace(config.run, weights=held)), run, listeners=[stop])
        recorded = samo_config(run)
        assert recorded.run.weights == held
        dense.append(lines(run, "state")[-1]["measured"]["dense"])
        resume(run, config=replace(recorded, run=replace(recorded.run, weights="resident")))
        found = [line["weights"] for line in lines(run, "state")]
        assert found == [None, held, "resident", "resident"]
        for ours, theirs in zip(without_state(one), without_state(run), strict=True):
            assert ours == theirs
        ours, theirs = weights(one), weights(run)
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
    dense.append(lines(one, "state")[-1]["measured"]["dense"])
    assert copies == dense[0] < dense[1] <= half < dense[2]


def without_state(run: Path) -> list[dict[str, Any]]:
    return [line for line in losses(run) if line["event"] != "state"]


def test_blocks_are_not_compiled_if_nothing_is_said(tmp_path: Path, text: Path) -> None:
    train(small(text, steps=4), tmp_path / "run")
    assert samo_config(tmp_path / "run").run.compile is False
    assert lines(tmp_path / "run", "compile") == []


def test_a_run_that_ended_abruptly_goes_on_from_its_last_checkpoint(
    tmp_path: Path, text: Path
) -> None:
    class CrashError(Exception):
        pass

    def crash() -> None:
        raise CrashError

    config = small(text)
    train(config, tmp_path / "whole")
    for step in (1, 2, 4, 7):  # before the first checkpoint, too
        run = tmp_path / f"crashed-{step}"
        with pytest.raises(CrashError):
            train(config, run, listeners=[Watcher(step, crash)])
        resume(run)
        assert_same_run(tmp_path / "whole", run)


def test_a_finished_run_can_be_made_longer(tmp_path: Path, text: Path) -> None:
    config = small(text)
    run = tmp_path / "run"
    train(replace(config, optim=OptimConfig(schedule="constant", warmup_steps=0)), run)
    longer = replace(samo_config(run), run=replace(samo_config(run).run, steps=10))
    result = resume(run, config=longer)
    assert result.step == 10
    assert [line["step"] for line in lines(run, "step")] == list(range(1, 11))
    assert samo_config(run).run.steps == 10


def samo_config(run: Path) -> TrainConfig:
    from samo.train.folder import RunFolder

    return RunFolder(run).config()


def test_a_finished_run_resumed_as_it_is_only_ends_again(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(small(text), run)
    before = weights(run)
    result = resume(run)
    assert result.step == 8
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in before.items())


def test_a_run_can_go_on_from_its_best_checkpoint(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(small(text), run)
    result = resume(run / "checkpoints" / "best")
    assert result.step == 8


def test_another_model_cannot_be_resumed(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(small(text), run)
    config = samo_config(run)
    wider = replace(config, model=replace(config.model, width=64))
    with pytest.raises(
        ConfigError, match=r"model.width was 32, not 64; leave it out, or start a new"
    ):
        resume(run, config=wider)


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path, text: Path) -> None:
    train(small(text), tmp_path / "a")
    config = small(text)
    train(replace(config, model=replace(config.model, width=64)), tmp_path / "b")
    os.rename(tmp_path / "a" / "checkpoints", tmp_path / "gone")
    os.rename(tmp_path / "b" / "checkpoints", tmp_path / "a" / "checkpoints")
    with pytest.raises(
        (CheckpointError, samo.MaskError),
        match=r"'blocks.0.attention.out.weight' has shape .64, 64. but",
    ):
        resume(tmp_path / "a")


def test_a_changed_text_is_refused(tmp_path: Path, text: Path) -> None:
    train(small(text), tmp_path / "run")
    text.write_text(text.read_text().replace("fox", "cat"))
    with pytest.raises(RunError, match=r"the text of .* has changed since it was trained on"):
        resume(tmp_path / "run")


def test_a_text_that_moved_is_found_where_it_is_now(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(small(text), run)
    moved = text.rename(tmp_path / "moved.txt")
    with pytest.raises(DataError, match=r"notes.txt"):
        resume(run)
    config = samo_config(run)
    assert resume(run, config=replace(config, data=replace(config.data, train=(moved,)))).step == 8


def test_a_checkpoint_that_is_of_no_run_is_refused(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    train(small(text), run)
    samo.save(run / "checkpoints" / "other", torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"was not saved by samo train"):
        resume(run / "checkpoints" / "other")


def test_a_run_starts_from_the_weights_and_masks_of_another(tmp_path: Path, text: Path) -> None:
    train(small(text), tmp_path / "first")
    source = tmp_path / "first" / "checkpoints" / "last"
    config = small(text)
    again = replace(
        config,
        model=replace(config.model, init=source),
        prune=PruneConfig(masks=source),
    )
    train(again, tmp_path / "second")
    pruned = lines(tmp_path / "second", "prune")[0]
    assert pruned["step"] == 0
    assert samo.Masks.load(tmp_path / "second" / "masks.safetensors") == samo.load_masks(source)
    first_loss = lines(tmp_path / "second", "step")[0]["loss"]
    assert first_loss < lines(tmp_path / "first", "step")[0]["loss"]


@pytest.mark.parametrize(
    ("prune", "message"),
    [
        (PruneConfig(skip=("nothing.*",)), "cannot prune: .*'nothing"),
        (PruneConfig(masks=Path("no-masks")), "mask file '.*no-masks' does not exist"),
    ],
)
def test_masks_that_cannot_be_drawn_are_refused(
    tmp_path: Path, text: Path, prune: PruneConfig, message: str
) -> None:
    config = replace(small(text), prune=replace(prune, dense_steps=0))
    with pytest.raises((ConfigError, samo.MaskError), match=message):
        train(config, tmp_path / "run")


def test_cuda_where_there_is_none_is_refused(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device cuda was asked for, and this machine has none"):
        train(small(text, device="cuda"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_text_that_is_too_short_leaves_no_folder(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(DataError, match=r"short.txt|tokens"):
        train(small(short), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def no_room(*args: object, **kwargs: object) -> None:
    raise CheckpointError("'last' could not be written: No space left on device")


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_the_last_one_stands(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train(small(text), tmp_path / "whole")
    fill = Watcher(4, lambda: monkeypatch.setattr("samo.train.snapshot.save", no_room))
    with pytest.raises(CheckpointError, match=r"No space left on device"):
        train(small(text), run, listeners=[fill])
    assert lines(run, "end")[-1]["reason"] == "failed"
    monkeypatch.undo()
    resume(run)
    assert_same_run(tmp_path / "whole", run)


def test_a_run_can_be_told_to_go_on_without_checkpoints(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    config = small(text, save_errors="continue")
    fill = Watcher(4, lambda: monkeypatch.setattr("samo.train.snapshot.save", no_room))
    result = train(config, run, listeners=[fill])
    assert result.step == 8
    failures = lines(run, "save_failed")
    assert [line["step"] for line in failures] == [4, 6, 8]
    assert "No space left on device" in failures[0]["reason"]
    assert (
        samo.checkpoint.read_manifest(run / "checkpoints" / "last").extra["progress"]["step"] == 3
    )


def test_a_diverged_run_ends_with_advice(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(text, steps=60, mode="dense")
    models: list[torch.nn.Module] = []

    def build(shape: GPTConfig) -> GPT:
        models.append(GPT(shape))
        return models[-1]  # type: ignore[return-value]

    monkeypatch.setattr(starting, "GPT", build)

    def poison() -> None:
        with torch.no_grad():
            models[-1].embed.weight.fill_(float("nan"))

    with pytest.raises(
        RunError, match=r"the loss has not been a number for 20 lines .* lower --lr"
    ):
        train(config, tmp_path / "run", listeners=[Watcher(3, poison)])
    assert lines(tmp_path / "run", "end")[-1]["reason"] == "failed"
    assert lines(tmp_path / "run", "step")[-1]["loss"] is None


@pytest.mark.parametrize("settings", [{"scope": "erk"}, {"pattern": "1:4"}], ids=str)
def test_a_run_is_pruned_by_its_density_rule(settings: Any, text: Path) -> None:
    config = starting.on_this_machine(replace(small(text), prune=PruneConfig(**settings)))
    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32))
    expected = samo.prune(model, config.prune.sparsity, seed=config.run.seed, **settings)
    learner = Learner(model, config.optim, dtype=torch.float32)
    assert masking.draw_masks(learner, config) == expected
    assert expected.sparsity == pytest.approx(0.75 if "pattern" in settings else 0.9, abs=1e-3)


def test_best_counts_only_what_is_pruned(tmp_path: Path, text: Path) -> None:
    """Dense weights may be better, but are not what the run is for."""
    config = small(text, steps=12, eval_every=2)
    train(replace(config, prune=PruneConfig(dense_steps=8)), tmp_path / "run")
    best = samo.checkpoint.read_manifest(tmp_path / "run" / "checkpoints" / "best")
    assert best.is_compressed
    after = [line for line in lines(tmp_path / "run", "eval") if line["step"] > 8]
    assert best.extra["progress"]["best_loss"] == min(line["valid_loss"] for line in after)


def train_or_resume(text: Path, run: Path) -> None:
    """Do what somebody does who types the same command after every crash; runs in a process."""
    torch.set_num_threads(1)
    config = small(text, steps=40, save_every=2, eval_every=5)
    if (run / "run.json").exists():
        resume(run)
    else:
        train(config, run)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_killed_at_20_random_moments_and_resumed_equals_the_undisturbed_one(
    tmp_path: Path, text: Path
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["samo.train.loop", "samo.kernels.cpu", "torch.utils.tensorboard"]
    )

    def start(run: Path) -> "multiprocessing.context.ForkServerProcess":
        process = context.Process(target=train_or_resume, args=(text, run))
        process.start()
        return process

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = start(whole)
    undisturbed.join()
    assert undisturbed.exitcode == 0
    metrics = killed / "metrics.jsonl"

    def grown(before: int) -> int:
        """Bytes of metrics since; less than none after a resume has dropped some."""
        return abs(metrics.stat().st_size - before) if metrics.exists() else 0

    draw = random.Random(5)
    kills, moments = 0, set()
    while True:
        process = start(killed)
        # A few lines on, so that it gets somewhere at any speed; then a little, to hit any moment.
        wanted = draw.randint(0, 6)
        before = metrics.stat().st_size if metrics.exists() else 0
        while process.is_alive() and grown(before) < 250 * wanted:
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.02))
        if kills < 20:
            process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        moments.add(metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
    assert kills >= 15  # fewer would mean that it ran to its end before it was killed
    assert len(moments) > 5
    assert_same_run(whole, killed)


def test_listeners_hear_everything(tmp_path: Path, text: Path) -> None:
    watcher = Watcher()
    result: Result = train(small(text), tmp_path / "run", listeners=[watcher])
    assert result.sample is not None
    heard = {type(event) for event in watcher.seen}
    others = {
        events.Resumed,
        events.NotSaved,
        events.Observed,
        events.Remapped,
        events.Exchanged,
        events.Compiled,
    }
    assert heard == {*events.NAMES, events.Ticked} - others


def test_the_first_pruned_weights_are_the_best_if_nothing_after_is_better(
    tmp_path: Path, text: Path
) -> None:
    config = replace(small(text), optim=OptimConfig(lr=0.0))
    train(config, tmp_path / "run")
    best = samo.checkpoint.read_manifest(tmp_path / "run" / "checkpoints" / "best")
    assert best.is_compressed
    assert best.extra["progress"]["step"] == 3


def test_masks_that_cannot_be_written_end_the_run_or_not_by_policy(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(masks: samo.Masks, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(samo.Masks, "save", full)
    with pytest.raises(
        RunError, match=r"cannot write the masks to .*: No space left on device; make"
    ):
        train(small(text), tmp_path / "stopped")
    result = train(small(text, save_errors="continue"), tmp_path / "run")
    assert result.step == 8
    assert "cannot write the masks" in lines(tmp_path / "run", "save_failed")[0]["reason"]
