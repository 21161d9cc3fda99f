"""The trainer: text in, checkpoints and metrics out.

    from samo.train.config import DataConfig, TrainConfig
    from samo.train.trainer import train

    result = train(TrainConfig(data=DataConfig(train=(Path("notes.txt"),))), Path("runs/notes"))

A run is a function of its settings and its text. A step depends only on the state that a checkpoint
holds: weights, moments, scaler, masks, the position in the text, the random generators. So a run
that was killed and resumed equals one that was not.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import torch

from samo.checkpoint import copy as copy_checkpoint
from samo.checkpoint.load import load_masks
from samo.data.batches import Batch, Batches, validation_batches
from samo.errors import CheckpointError, ConfigError, RunError, SamoError
from samo.mask.masks import Masks
from samo.memory.ledger import Ledger
from samo.models.generate import generate
from samo.train import events, setup
from samo.train.checkpointing import Progress, load_run, save_run
from samo.train.compile import CompileClock
from samo.train.config import ResolvedConfig, TrainConfig
from samo.train.config_io import to_dict
from samo.train.events import Event, Listener
from samo.train.lr_schedule import learning_rate
from samo.train.masking import Masking
from samo.train.metrics import MetricsFile, boards
from samo.train.rank_group import RankGroup
from samo.train.resolve import check_batch, gpt_config, resolve, resolve_resumed
from samo.train.run_dir import RunDir, check_free
from samo.train.setup import Text
from samo.train.signals import Interrupt
from samo.train.state_bytes import accounted
from samo.train.step import Learner
from samo.utils.environment import memory_in_use

__all__ = ["Result", "resume", "train"]

_logger = logging.getLogger(__name__)

_PROMPT_TOKENS: Final = 32
_LINES_UNTIL_DIVERGED: Final = 20


class Result(NamedTuple):
    """How a run ended."""

    folder: Path
    step: int
    """Steps taken."""
    valid_loss: float | None
    """Loss of the last validation."""
    signal: int | None
    """The signal that interrupted it, or None if it is complete."""
    sample: str | None
    """The text that the model has generated."""
    ledger: Ledger | None
    """The bytes of its state, if it was compressed."""
    saved_step: int | None
    """Step of the newest checkpoint that this process wrote."""


def train(
    config: TrainConfig,
    out: Path,
    *,
    listeners: Iterable[Listener] = (),
    ranks: RankGroup | None = None,
) -> Result:
    """Train a model from its first step.

    Under torchrun every rank makes the same call; rank 0 writes the files.

    Args:
        config: The settings.
        out: The run folder to create; it must not exist, or be empty.
        listeners: Receivers of events, besides the metrics file.
        ranks: The ranks, if they have joined already.

    Raises:
        ConfigError, DataError, MaskError: The settings, the text or the given masks cannot be used.
        CheckpointError: ``model.init`` cannot be read, or a checkpoint cannot be written.
        RunError: The folder cannot be used, or the run has diverged.
        PeerError: Another rank failed.
    """
    resolved = config if isinstance(config, ResolvedConfig) else resolve(config)
    ranks = ranks or RankGroup.join(resolved.mesh, resolved.run.device)
    with ranks.watched(), ExitStack() as stack:
        check_batch(resolved, ranks.num_replicas)
        ranks.check_same("settings", to_dict(resolved))
        ranks.run_on_rank0("the run folder", lambda: check_free(out))
        text = ranks.run_on_rank0_first("the text", lambda: setup.open_text(resolved, out))
        resolved = replace(resolved, data=replace(resolved.data, vocab_size=text.vocab_size))
        shape = gpt_config(resolved.model, text.vocab_size)
        setup.check_memory(resolved, shape)
        learner = setup.new_learner(resolved, shape, ranks)
        masking = Masking(resolved, learner)
        ranks.run_all("the masks", masking.check)
        folder = ranks.run_on_rank0("the run folder", lambda: RunDir.create(out)) or RunDir(out)
        stack.callback(folder.close)
        record = setup.run_record(resolved, out, text, learner)
        ranks.run_on_rank0("run.json", lambda: folder.write_run(record))
        batches = setup.new_batches(resolved, text, ranks)
        parts = (resolved, folder, text, learner, masking, batches)
        return Trainer(*parts, Progress(), list(listeners)).run()


def resume(
    path: Path,
    *,
    config: TrainConfig | None = None,
    listeners: Iterable[Listener] = (),
    ranks: RankGroup | None = None,
) -> Result:
    """Resume a run that was interrupted or killed, exactly at its last checkpoint.

    Args:
        path: The run folder, or one of its checkpoints (``RUN/checkpoints/best``).
        config: Settings, some of which may differ from those of the run: see ``CHANGEABLE``.
        listeners: Receivers of events, besides the metrics file.
        ranks: The ranks, if they have joined already; their number may differ from before.

    Raises:
        RunError: It is not a run folder, another process trains there, or its text has changed.
        ConfigError: A setting differs that may not change.
        CheckpointError: The checkpoint is damaged, or belongs to another model.
    """
    folder = RunDir.find(path)
    checkpoint = folder.last if folder.path == path else path
    recorded = folder.config()
    wanted = config or replace(recorded, mesh=replace(recorded.mesh, data="auto"))
    resolved = resolve_resumed(recorded, wanted)
    run = resolved.run
    ranks = ranks or RankGroup.join(resolved.mesh, run.device)
    with ranks.watched(), ExitStack() as stack:
        check_batch(resolved, ranks.num_replicas)
        ranks.check_same("settings", to_dict(resolved))
        ranks.run_on_rank0("the run folder", folder.lock)
        stack.callback(folder.close)
        text = ranks.run_on_rank0_first("the text", lambda: setup.open_same_text(resolved, folder))
        # A run that was killed before its first checkpoint was complete starts again.
        has_checkpoint = checkpoint != folder.last or folder.has_checkpoint
        shape = gpt_config(resolved.model, text.vocab_size)
        learner = setup.new_learner(resolved, shape, ranks, loads_later=has_checkpoint)
        masking = Masking(resolved, learner)
        batches = setup.new_batches(resolved, text, ranks)
        progress = Progress()
        if has_checkpoint:
            progress = load_run(checkpoint, learner, masking, batches)
        if run.steps < progress.step:
            raise ConfigError(
                f"the run has taken {progress.step:,} steps already, more than the {run.steps:,} "
                "asked for; leave --steps out, or raise it"
            )
        if run.eval_batches != recorded.run.eval_batches:
            progress.best_loss = None  # losses on other batches cannot be compared
        before = (recorded.run.weights, recorded.mesh.shard)
        if (run.weights, resolved.mesh.shard) != before:
            progress.accounted = None  # its state has another size from here on

        def write_changes() -> None:
            if checkpoint != folder.last:
                copy_checkpoint(checkpoint, folder.last)  # later steps are given up
            folder.write_run(folder.read_run() | setup.launch_record(resolved, ranks))

        ranks.run_on_rank0("the run folder", write_changes)
        parts = (resolved, folder, text, learner, masking, batches)
        return Trainer(*parts, progress, list(listeners)).run()


@dataclass(eq=False)
class Trainer:
    """A run from its current step to its end: steps, pruning, validation, checkpoints, metrics."""

    config: ResolvedConfig
    folder: RunDir
    text: Text
    learner: Learner
    masking: Masking
    batches: Batches
    progress: Progress
    listeners: list[Listener]

    def __post_init__(self) -> None:
        run, folder, progress = self.config.run, self.folder, self.progress
        self.ranks = self.learner.ranks
        self.metrics: MetricsFile | None = None
        if self.ranks.is_first:
            is_complete = progress.step >= run.steps  # then all lines are valid
            size = None if is_complete else progress.metrics_bytes
            self.metrics = MetricsFile(folder.metrics, size=size, on_error=run.save_errors)
            self.listeners += [self.metrics, *boards(folder.path / "tensorboard", progress.step)]
        self.nonfinite_lines = 0
        self.last_line = (progress.step, progress.tokens, progress.elapsed_s)
        self.has_stepped = False
        self.saved_step: int | None = None
        self.sample: str | None = None
        self.clock = CompileClock(
            on_start=lambda: self.report(events.Compiling(step=progress.step))
        )

    def run(self) -> Result:
        """Train to the end, or until a signal arrives."""
        steps, progress = self.config.run.steps, self.progress
        start = events.Resumed if progress.step else events.Started
        try:
            self.report(start(step=progress.step, steps=steps, time=time.time()))
            if self.masking.changes and self.learner.masks is not None:
                self.save_masks(self.learner.masks)  # the file may hold those of a later step
            signal = self.loop()
            is_done = progress.step >= steps
            if is_done:
                self.finish()
            reason: Final = "done" if is_done else "interrupted"
            self.report(events.Ended(step=progress.step, reason=reason))
        except (RuntimeError, SamoError) as error:  # not every SamoError is a RuntimeError
            cause = self.ranks.cause(error)
            if cause is not None:
                with suppress(RunError):
                    self.report(events.Ended(step=progress.step, reason="failed"))
            if cause is None or cause is error:
                raise
            raise cause from error
        finally:
            if self.metrics is not None:
                self.metrics.close()
        result = Result(
            folder=self.folder.path,
            step=progress.step,
            valid_loss=progress.valid_loss,
            signal=None if is_done else signal,
            sample=self.sample,
            ledger=self.learner.ledger(),
            saved_step=self.saved_step,
        )
        self.learner.close()
        self.ranks.leave()
        return result

    def loop(self) -> int | None:
        """Take steps until the last one or a signal, which is returned."""
        run, progress, ranks = self.config.run, self.progress, self.ranks
        with Interrupt() as interrupt, ExitStack() as stack:
            if self.learner.is_compiled:
                stack.enter_context(self.clock.running())
            signal = ranks.any_signal(interrupt.signal)
            while progress.step < run.steps and signal is None:
                self.prune_if_due()
                self.take_step()
                is_last, is_best = progress.step >= run.steps, False
                if is_last or progress.step % run.eval_every == 0:
                    is_best = self.evaluate()
                signal = ranks.any_signal(interrupt.signal)
                is_end = is_last or signal is not None
                if is_end or is_best or progress.step % run.save_every == 0:
                    self.save(is_best=is_best)
                    signal = signal or ranks.any_signal(interrupt.signal)
        return signal

    def prune_if_due(self) -> None:
        """End the dense phase after its steps, or when the masks are stable."""
        progress = self.progress
        if not self.masking.is_due(progress.step):
            return
        if progress.step and progress.valid_step != progress.step:
            self.evaluate()  # the loss before pruning, to compare with
        masks, pruned = self.masking.draw(progress.step)
        self.save_masks(masks)
        self.learner.prune(masks)
        self.masking.start_changing()
        self.report(pruned)
        progress.best_loss = None  # dense losses do not count for a pruned model
        if progress.step and self.evaluate():
            self.save(is_best=True)

    def take_step(self) -> None:
        """Take one optimizer step, and write a line of metrics if one is due."""
        run, progress, step = self.config.run, self.progress, self.progress.step + 1
        started = time.perf_counter()
        batches = [next(self.batches) for _ in range(run.accumulate)]
        loss = self.learner.backward(batches)
        lr = learning_rate(step, run.steps, self.config.optim)
        norm = self.learner.step(lr)
        line: tuple[float, float] | None = None
        if step % run.log_every == 0 or step >= run.steps:  # synchronizes device and ranks
            line = self.learner.whole_loss(loss), float(norm)
        progress.step = step
        progress.tokens += sum(batch.num_tokens for batch in batches)
        compiling_s = self.clock.take()
        progress.elapsed_s += time.perf_counter() - started - compiling_s
        is_known = progress.accounted == self.learner.phase
        if not is_known or not self.has_stepped:  # gradients and moments exist now
            progress.accounted = self.learner.phase
            self.report(accounted(step, self.learner, is_known=is_known))
        if compiling_s:
            self.report(events.Compiled(step=step, seconds=compiling_s))
        if line is not None:
            self.log(*line, lr)
        self.has_stepped = True
        self.update_masks()
        self.report(events.Ticked(step=step))

    def update_masks(self) -> None:
        """Observe the masks of a dense model, or change those of a pruned one, if that is due."""
        progress = self.progress
        with self.paused():
            seen = self.masking.observe(progress.step)
            change = self.masking.change(progress.step)
        if seen is not None:
            self.report(seen)
        if change is not None and self.learner.masks is not None:
            self.save_masks(self.learner.masks)
            self.report(change)
            if change.dropped != change.grown:  # losses of a sparser model cannot be compared
                progress.best_loss = progress.accounted = None

    def log(self, loss: float, norm: float, lr: float) -> None:
        """Write a line of metrics, and what each rank has sent."""
        progress = self.progress
        line = (progress.step, progress.tokens, progress.elapsed_s)
        steps, tokens, seconds = (now - then for now, then in zip(line, self.last_line))
        self.last_line = line
        memory_bytes = memory_in_use(self.learner.device)
        self.report(
            events.Stepped(
                step=progress.step,
                phase=self.learner.phase,
                loss=loss,
                lr=lr,
                grad_norm=norm,
                tokens=progress.tokens,
                epoch=self.batches.epoch,
                tokens_per_s=tokens / seconds,
                step_ms=1000 * seconds / steps,
                memory_bytes=memory_bytes,
                skipped_steps=self.learner.skipped_steps,
                elapsed_s=progress.elapsed_s,
            )
        )
        if self.ranks.size > 1:
            own = {**self.learner.traffic(), "memory_bytes": memory_bytes}
            for rank, sent in enumerate(self.ranks.all_gather("the traffic", own)):
                stage, replica = divmod(rank, self.ranks.num_replicas)
                place = {"rank": rank, "stage": stage, "replica": replica}
                self.report(events.Exchanged(step=progress.step, **place, **sent))
        self.nonfinite_lines = 0 if math.isfinite(loss) else self.nonfinite_lines + 1
        if self.nonfinite_lines >= _LINES_UNTIL_DIVERGED:
            raise RunError(
                f"the run has diverged: no finite loss in {self.nonfinite_lines} lines of metrics, "
                f"up to step {progress.step:,}; start a new one with a lower --lr, a longer "
                "--warmup-steps, or --density-power 0"
            )

    def evaluate(self) -> bool:
        """Validate, and return whether the loss is the lowest so far."""
        progress = self.progress
        with self.paused():
            loss = self.learner.evaluate(self.validation_batches(self.ranks.part))
        progress.valid_loss, progress.valid_step = loss, progress.step
        self.report(
            events.Evaluated(
                step=progress.step,
                valid_loss=loss,
                perplexity=math.exp(min(loss, 700.0)),
                tokens=progress.tokens,
                elapsed_s=progress.elapsed_s,
            )
        )
        is_best = progress.best_loss is None or loss < progress.best_loss
        if is_best and math.isfinite(loss):
            progress.best_loss = loss
            return True
        return False

    def validation_batches(self, part: tuple[int, int]) -> Iterator[Batch]:
        """Return a part of the batches to validate on, the same ones every time."""
        return validation_batches(
            self.text.valid,
            context=self.config.model.context,
            batch_size=self.config.run.batch_size,
            max_batches=self.config.run.eval_batches,
            part=part,
        )

    def save_masks(self, masks: Masks) -> None:
        """Write the mask file."""
        if not self.ranks.is_first or self.ranks.num_stages > 1:  # save() does it for stages
            return
        try:
            masks.save(self.folder.masks)
        except OSError as error:
            message = f"cannot write the masks to '{self.folder.masks}': {error.strerror}"
            if self.config.run.save_errors == "stop":
                raise RunError(f"{message}; free some space, then resume with --resume") from error
            self.report(events.NotSaved(step=self.progress.step, reason=message))

    def save(self, *, is_best: bool) -> None:
        """Write a checkpoint."""
        folder, progress, started = self.folder, self.progress, time.perf_counter()
        if self.metrics is not None:
            progress.metrics_bytes = self.metrics.size
        try:
            with self.paused():
                save_run(
                    folder.last,
                    self.learner,
                    self.masking,
                    self.batches,
                    progress,
                    shape=gpt_config(self.config.model, self.text.vocab_size),
                    tokenizer=self.text.tokenizer.name,
                )
                if is_best and self.ranks.is_first:
                    copy_checkpoint(folder.last, folder.best)
        except CheckpointError as error:  # on all ranks alike
            if self.config.run.save_errors == "stop":
                raise
            self.report(events.NotSaved(step=progress.step, reason=str(error)))
            return
        self.saved_step = progress.step
        if self.ranks.num_stages > 1 and self.ranks.is_first and self.learner.phase == "samo":
            load_masks(folder.last).save(folder.masks)  # the checkpoint holds those of all stages
        self.report(
            events.Saved(
                step=progress.step,
                path=folder.last.relative_to(folder.path).as_posix(),
                bytes=sum(f.stat().st_size for f in folder.last.rglob("*") if f.is_file()),
                seconds=time.perf_counter() - started,
            )
        )

    def finish(self) -> None:
        """Report the state, and generate a sample."""
        if self.has_stepped:
            self.report(accounted(self.progress.step, self.learner))
        run, ranks = self.config.run, self.ranks
        # With shards all ranks run the model; otherwise rank 0 alone.
        runs_model = ranks.is_first or self.config.mesh.shard == "weights"
        if not run.sample_tokens or ranks.num_stages > 1 or not runs_model:
            return
        prompt_T = next(self.validation_batches((0, 1))).inputs_BT[0, :_PROMPT_TOKENS]
        try:
            with self.learner.in_eager():  # every token is a new shape
                tokens_T = generate(
                    self.learner.model,
                    prompt_T,
                    run.sample_tokens,
                    context=self.config.model.context,
                    seed=run.seed,
                )
        except KeyboardInterrupt:  # everything is saved; the sample is left out
            return
        if ranks.is_first:
            self.sample = self.text.tokenizer.decode(tokens_T.numpy())
            self.report(events.Sampled(step=self.progress.step, text=self.sample))

    def report(self, event: Event) -> None:
        """Pass an event to all listeners; one that cannot write is removed."""
        for listener in list(self.listeners):
            try:
                listener.on(event)
            except OSError as error:  # a closed pipe or a full disk must not end the run
                self.listeners.remove(listener)
                _logger.warning("%s gets no more events: %s", type(listener).__name__, error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the body out of the time of training: wait for queued kernels first."""
        if self.learner.device.type == "cuda":
            started = time.perf_counter()
            torch.cuda.synchronize(self.learner.device)
            self.progress.elapsed_s += time.perf_counter() - started
        yield
