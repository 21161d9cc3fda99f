"""One run, from where it stands to its end: steps, pruning, validation, checkpoints, metrics."""

import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from samo.checkpoint import copy as copy_checkpoint
from samo.checkpoint.load import load_masks
from samo.data.batches import Batch, Batches, validation_batches
from samo.errors import CheckpointError, RunError, SamoError
from samo.mask.masks import Masks
from samo.memory.ledger import Ledger
from samo.models.generate import generate
from samo.train import events, snapshot
from samo.train.accounts import accounted
from samo.train.compiling import Clock
from samo.train.config import TrainConfig, gpt_config
from samo.train.events import Event, Listener
from samo.train.folder import RunFolder
from samo.train.interrupt import Interrupt
from samo.train.learner import Learner
from samo.train.masking import Masking
from samo.train.metrics import Board, MetricsFile, RankFile, has_tensorboard
from samo.train.schedule import learning_rate
from samo.train.snapshot import Progress
from samo.train.text import Text
from samo.utils.environment import memory_in_use

__all__ = ["Result"]

_logger = logging.getLogger(__name__)

_PROMPT_TOKENS: Final = 32
_LINES_UNTIL_DIVERGED: Final = 20


class Result(NamedTuple):
    """How a run ended."""

    folder: Path
    """Its folder."""
    step: int
    """Steps taken."""
    valid_loss: float | None
    """Loss of the last validation."""
    signal: int | None
    """The signal that ended it, or None if it ran to its end."""
    sample: str | None
    """What the model wrote."""
    ledger: Ledger | None
    """The account of its state, if it was compressed."""
    saved_step: int | None
    """Step of the newest checkpoint that this process wrote."""


class Run:
    """A run from where it stands to its end."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        text: Text,
        learner: Learner,
        masking: Masking,
        progress: Progress,
        listeners: Iterable[Listener],
    ) -> None:
        assert isinstance(config.model.context, int)
        assert isinstance(config.data.vocab_size, int)
        self.config = config
        self.shape = gpt_config(config.model, config.data.vocab_size)
        self.folder = folder
        self.text = text
        self.learner = learner
        self.ranks = learner.ranks
        self.masking = masking
        self.at = progress
        self.batches = Batches(
            text.train,
            context=config.model.context,
            batch_size=config.run.batch_size,
            seed=config.run.seed,
            part=self.ranks.part,
        )
        self.batches.position = progress.position
        is_over = progress.step >= config.run.steps  # then what was written is about it as it is
        self.metrics: MetricsFile | RankFile
        self.board: Board | None = None
        if self.ranks.is_first:
            self.metrics = MetricsFile(
                folder.metrics,
                size=None if is_over else progress.metrics_bytes,
                on_error=config.run.save_errors,
            )
            if has_tensorboard():
                self.board = Board(folder.path / "tensorboard", step=progress.step)
        else:
            self.metrics = RankFile(
                folder.rank_metrics(self.ranks.rank),
                step=progress.step,
                on_error=config.run.save_errors,
            )
        board = [] if self.board is None else [self.board]
        self.listeners: list[Listener] = [*listeners, self.metrics, *board]
        self.lines_without_loss = 0
        self.logged_at = (progress.step, progress.tokens, progress.elapsed_s)
        self.has_stepped = False
        self.saved_step: int | None = None
        self.sample: str | None = None
        self.compiling = Clock(self.tell_compiling)
        self.has_told_compiling = False

    def go(self) -> Result:
        """Train to the end, or until a signal comes."""
        run = self.config.run
        start = events.Resumed if self.at.step else events.Started
        try:
            self.tell(start(step=self.at.step, steps=run.steps, time=time.time()))
            if self.masking.changes and self.learner.masks is not None:
                self.save_masks(
                    self.learner.masks
                )  # those of the checkpoint, not of a later change
            clock = self.compiling.running() if self.learner.is_compiled else nullcontext()
            with Interrupt() as interrupt, clock:
                signal = self.ranks.common_signal(interrupt.signal)
                while self.at.step < run.steps and signal is None:
                    self.prune_if_due()
                    self.take_step()
                    is_last = self.at.step >= run.steps
                    is_best = False
                    if is_last or self.at.step % run.eval_every == 0:
                        is_best = self.evaluate()
                    signal = self.ranks.common_signal(interrupt.signal)
                    stops = is_last or signal is not None
                    if stops or is_best or self.at.step % run.save_every == 0:
                        self.save(is_best=is_best)
                        signal = signal or self.ranks.common_signal(interrupt.signal)
            is_done = self.at.step >= run.steps
            if is_done:
                self.finish()
            reason: Literal["done", "interrupted"] = "done" if is_done else "interrupted"
            self.tell(events.Ended(step=self.at.step, reason=reason))
            return Result(
                folder=self.folder.path,
                step=self.at.step,
                valid_loss=self.at.valid_loss,
                signal=None if is_done else signal,
                sample=self.sample,
                ledger=self.learner.ledger(),
                saved_step=self.saved_step,
            )
        except (RuntimeError, SamoError) as error:  # not all of ours are RuntimeErrors
            cause = self.ranks.cause(error)
            if cause is not None:
                with suppress(RunError):
                    self.tell(events.Ended(step=self.at.step, reason="failed"))
            if cause is None or cause is error:
                raise
            raise cause from error
        finally:
            self.metrics.close()
            if self.board is not None:
                with suppress(OSError):
                    self.board.close()

    def prune_if_due(self) -> None:
        """Leave the dense phase when its steps are over, or when masks have settled."""
        if not self.masking.is_due(self.at.step):
            return
        if self.at.step and self.at.valid_step != self.at.step:
            self.evaluate()  # what pruning costs shows only beside what was there before
        masks, pruned = self.masking.draw(self.at.step)
        self.save_masks(masks)
        self.learner.prune(masks)
        self.masking.follow()
        self.tell(pruned)
        self.at.best_loss = None  # what was dense does not count against what is pruned
        if self.at.step and self.evaluate():
            self.save(is_best=True)

    def look_at_masks(self) -> None:
        """Let early-bird look at a dense model, and masks change in a pruned one, if it is time."""
        with self.pause():
            seen, change = self.masking.look(self.at.step), self.masking.change(self.at.step)
        if seen is not None:
            self.tell(seen)
        if change is not None:
            assert self.learner.masks is not None
            self.save_masks(self.learner.masks)
            self.tell(change)
            if change.dropped != change.grown:  # a smaller model: its losses are no match
                self.at.best_loss = None
                self.at.accounted = None

    def save_masks(self, masks: Masks) -> None:
        """Write the masks.

        Raises:
            RunError: They could not be written, and the run is to stop then.
        """
        if not self.ranks.is_first or self.ranks.num_stages > 1:  # see save() for stages
            return
        try:
            masks.save(self.folder.masks)
        except OSError as error:
            message = f"cannot write the masks to '{self.folder.masks}': {error.strerror}"
            if self.config.run.save_errors == "stop":
                raise RunError(f"{message}; make room, then go on with --resume") from error
            self.tell(events.NotSaved(step=self.at.step, reason=message))

    def take_step(self) -> None:
        """Take one optimizer step, and write a line if one is due."""
        run, step = self.config.run, self.at.step + 1
        began = time.perf_counter()
        batches = [next(self.batches) for _ in range(run.accumulate)]
        loss = self.learner.backward(batches)
        lr = learning_rate(step, run.steps, self.config.optim)
        norm = self.learner.step(lr)
        is_logged = step % run.log_every == 0 or step >= run.steps
        numbers = None
        if is_logged:  # waits for the device, and for the other ranks
            numbers = (self.learner.whole_loss(loss), float(norm))
        self.at.step = step
        self.at.tokens += sum(batch.num_tokens for batch in batches)
        self.at.position = self.batches.position
        compiling_s = self.compiling.take()
        self.at.elapsed_s += time.perf_counter() - began - compiling_s
        is_known = self.at.accounted == self.learner.phase
        if not is_known or not self.has_stepped:  # gradients and moments are there now
            self.at.accounted = self.learner.phase
            self.tell(accounted(step, self.learner, is_known=is_known))
        if compiling_s:
            self.has_told_compiling = False
            self.tell(events.Compiled(step=step, seconds=compiling_s))
        if numbers is not None:
            self.log(*numbers, lr)
        self.has_stepped = True
        self.look_at_masks()
        self.tell(events.Ticked(step=step))

    def log(self, loss: float, norm: float, lr: float) -> None:
        """Write a line of metrics.

        Raises:
            RunError: The loss has not been a number for many lines.
        """
        steps, tokens, seconds = (
            now - then
            for now, then in zip((self.at.step, self.at.tokens, self.at.elapsed_s), self.logged_at)
        )
        self.logged_at = (self.at.step, self.at.tokens, self.at.elapsed_s)
        self.tell(
            events.Stepped(
                step=self.at.step,
                phase=self.learner.phase,
                loss=loss,
                lr=lr,
                grad_norm=norm,
                tokens=self.at.tokens,
                epoch=self.batches.epoch,
                tokens_per_s=tokens / seconds,
                step_ms=1000 * seconds / steps,
                memory_bytes=memory_in_use(self.learner.device),
                skipped_steps=self.learner.skipped_steps,
                elapsed_s=self.at.elapsed_s,
            )
        )
        self.tell_traffic()
        self.lines_without_loss = 0 if math.isfinite(loss) else self.lines_without_loss + 1
        if self.lines_without_loss >= _LINES_UNTIL_DIVERGED:
            raise RunError(
                f"the loss has not been a number for {self.lines_without_loss} lines of metrics, up to "
                f"step {self.at.step:,}; the run has diverged: start a new one with a lower --lr, a "
                "longer --warmup-steps, or pruned weights that learn no faster than others "
                "(--density-power 0)"
            )

    def tell_compiling(self) -> None:
        """Say why a step takes so long, once for all that it compiles."""
        if not self.has_told_compiling:
            self.has_told_compiling = True
            self.tell(events.Compiling(step=self.at.step))

    def tell_traffic(self) -> None:
        """Write what this rank has sent, if there are others."""
        traffic = self.learner.traffic()
        if traffic is not None:
            self.tell(
                events.Exchanged(
                    step=self.at.step,
                    rank=self.ranks.rank,
                    stage=self.ranks.stage,
                    replica=self.ranks.replica,
                    memory_bytes=memory_in_use(self.learner.device),
                    **traffic,
                )
            )

    def evaluate(self) -> bool:
        """Validate, and return whether the loss is the lowest so far."""
        with self.pause():
            loss = self.learner.evaluate(self.validation())
        self.at.valid_loss, self.at.valid_step = loss, self.at.step
        self.tell(
            events.Evaluated(
                step=self.at.step,
                valid_loss=loss,
                perplexity=math.exp(min(loss, 700.0)),
                tokens=self.at.tokens,
                elapsed_s=self.at.elapsed_s,
            )
        )
        if not math.isfinite(loss) or (self.at.best_loss is not None and loss >= self.at.best_loss):
            return False
        self.at.best_loss = loss
        return True

    def validation(self, part: tuple[int, int] | None = None) -> Iterator[Batch]:
        """Return the batches to validate on, the same ones every time; this rank's part if not told."""
        context, run = self.config.model.context, self.config.run
        assert isinstance(context, int)
        return validation_batches(
            self.text.valid,
            context=context,
            batch_size=run.batch_size,
            max_batches=run.eval_batches,
            part=part or self.ranks.part,
        )

    def save(self, *, is_best: bool) -> None:
        """Write a checkpoint.

        Raises:
            CheckpointError: It could not be written, and the run is to stop then.
        """
        began = time.perf_counter()
        self.at.metrics_bytes = self.metrics.size
        try:
            with self.pause():
                snapshot.write(
                    self.folder.last,
                    self.learner,
                    self.masking,
                    self.at,
                    shape=self.shape,
                    tokenizer=self.text.tokenizer.name,
                )
                if is_best and self.ranks.is_first:
                    copy_checkpoint(self.folder.last, self.folder.best)
        except CheckpointError as error:  # on all ranks alike
            if self.config.run.save_errors == "stop":
                raise
            self.tell(events.NotSaved(step=self.at.step, reason=str(error)))
            return
        self.saved_step = self.at.step
        if self.ranks.num_stages > 1 and self.ranks.is_first and self.learner.phase == "samo":
            load_masks(self.folder.last).save(self.folder.masks)  # where those of all stages are
        self.tell(
            events.Saved(
                step=self.at.step,
                path=self.folder.last.relative_to(self.folder.path).as_posix(),
                bytes=sum(f.stat().st_size for f in self.folder.last.rglob("*") if f.is_file()),
                seconds=time.perf_counter() - began,
            )
        )

    def finish(self) -> None:
        """Account for the state, and let the model write."""
        if self.has_stepped:
            self.tell(accounted(self.at.step, self.learner))
        is_whole = self.ranks.num_stages == 1  # a stage alone writes nothing
        is_sharded = self.config.mesh.shard == "weights"  # and a share alone neither
        if not (self.config.run.sample_tokens and is_whole and (self.ranks.is_first or is_sharded)):
            return
        assert isinstance(self.config.model.context, int)
        prompt_T = next(self.validation(part=(0, 1))).inputs_BT[0, :_PROMPT_TOKENS]
        try:
            with self.learner.in_eager():  # each token is a shape of its own
                tokens_T = generate(
                    self.learner.model,
                    prompt_T,
                    self.config.run.sample_tokens,
                    context=self.config.model.context,
                    seed=self.config.run.seed,
                )
        except KeyboardInterrupt:  # all is saved; whoever is in a hurry goes without
            return
        if not self.ranks.is_first:
            return
        self.sample = self.text.tokenizer.decode(tokens_T.numpy())
        self.tell(events.Sampled(step=self.at.step, text=self.sample))

    def tell(self, event: Event) -> None:
        """Tell everybody what happened; a display or a board that cannot write is left out from then on.

        Raises:
            RunError: The metrics cannot be written, and the run is to stop then.
        """
        for listener in list(self.listeners):
            try:
                listener.on(event)
            except OSError as error:  # a closed pipe, a full disk: no reason to lose the run
                self.listeners.remove(listener)
                _logger.warning("%s is left out: %s", type(listener).__name__.lower(), error)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep what follows out of the time of training: let queued steps end before it begins."""
        if self.learner.device.type == "cuda":
            began = time.perf_counter()
            torch.cuda.synchronize(self.learner.device)
            self.at.elapsed_s += time.perf_counter() - began
        yield
