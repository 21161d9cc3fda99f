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
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import torch

from samo.checkpoint import copy as copy_checkpoint, staging
from samo.data.batches import IGNORE, Batch, validation_batches
from samo.data.examples import Examples
from samo.errors import CheckpointError, DataError, RunError, SamoError
from samo.memory.ledger import Ledger
from samo.train import events
from samo.train.config_io import to_dict
from samo.train.events import Listener
from samo.train.finetune_config import Config, FinetuneConfig
from samo.train.gpt_subject import GPTSubject
from samo.train.learning_rate import learning_rate
from samo.train.masking import Masking
from samo.train.metrics import Reporter
from samo.train.rank_group import Interrupt, RankGroup
from samo.train.resolve import again, resolve, resolve_resumed
from samo.train.rules import check_batch
from samo.train.run_dir import RunDir, check_free
from samo.train.run_record import launch_record, run_record
from samo.train.run_state import RunState
from samo.train.saver import Saver
from samo.train.subject import Subject, Text
from samo.utils.environment import memory_in_use

_PROMPT_TOKENS: Final = 32
_log: Final = logging.getLogger(__name__)
_LINES_UNTIL_DIVERGED: Final = 20


class Result(NamedTuple):
    """How a run ended."""

    folder: Path
    step: int  # steps taken
    saved_step: int | None  # of its last checkpoint
    valid_loss: float | None  # of the last validation
    signal: int | None  # the signal that interrupted it; None if it is complete
    ledger: Ledger | None  # the bytes of its state, if it was compressed


def train(
    config: Config,
    out: Path,
    *,
    listeners: Iterable[Listener] = (),
    ranks: RankGroup | None = None,
) -> Result:
    """Train a model from its first step, in a folder that must not exist, or be empty.

    Under torchrun every rank makes the same call; rank 0 writes the files. ``listeners`` receive
    the events that go to the metrics file; ``ranks`` are given if they have joined already.

    Raises:
        SamoError: Settings, text, masks or folder cannot be used, the run has diverged, a
            checkpoint cannot be written, or another rank failed.
    """
    resolved: Config = resolve(config)
    with _joined(resolved, ranks) as ranks, ExitStack() as stack:
        ranks.run_on_rank0("the run folder", lambda: check_free(out))
        subject = subject_of(resolved)
        if ranks.is_first and not out.exists():
            stack.push(lambda *error: _remove_draft(out) if error[0] else None)
        ranks.run_on_rank0_first("the text", lambda: subject.open_text(out))
        state = RunState(subject, ranks)
        folder = ranks.run_on_rank0("the run folder", lambda: RunDir.create(out)) or RunDir(out)
        stack.callback(folder.close)

        def write_files() -> None:
            subject.write_files(folder)
            folder.write_run(run_record(subject, out, state.learner))

        ranks.run_on_rank0("the run folder", write_files)
        return Trainer(folder, state, listeners).run()


def resume(
    path: Path,
    *,
    config: Config | None = None,
    listeners: Iterable[Listener] = (),
    ranks: RankGroup | None = None,
) -> Result:
    """Resume a run that was interrupted or killed, exactly at its last checkpoint.

    ``path`` is the run folder, or one of its checkpoints (``RUN/checkpoints/best``). Some settings
    may differ from those of the run (see ``CHANGEABLE``), and so may the number of ranks.

    Raises:
        SamoError: As for `train`; or text, settings or checkpoint are not those of this run.
    """
    folder = RunDir.find(path)
    checkpoint = folder.last if folder.path == path else path
    recorded = folder.config()
    resolved = resolve_resumed(recorded, config or again(recorded))
    with _joined(resolved, ranks) as ranks, ExitStack() as stack:
        ranks.run_on_rank0("the run folder", folder.lock)
        stack.callback(folder.close)
        subject = subject_of(resolved, folder)
        ranks.run_on_rank0_first("the text", lambda: _open_same_text(subject, folder))
        # A run that was killed before its first checkpoint was complete starts again.
        has_checkpoint = checkpoint != folder.last or folder.has_checkpoint
        state = RunState(subject, ranks, checkpoint if has_checkpoint else None)
        run, progress = subject.config.run, state.progress
        if run.eval_batches != progress.eval_batches:
            progress.forget_best()
        before = (recorded.run.weights, recorded.mesh.shard)
        if (run.weights, resolved.mesh.shard) != before:
            progress.accounted = None  # its state has another size from here on

        def write_changes() -> bool:
            if checkpoint != folder.last:
                copy_checkpoint(checkpoint, folder.last)  # later steps are dropped
                folder.remove_kept(all_but=run.keep, up_to=progress.step)
            has_best = folder.restore_best(progress.best_step, up_to=progress.step)
            folder.write_run(folder.read_run() | launch_record(subject.config, ranks))
            return has_best

        has_best = ranks.run_on_rank0("the run folder", write_changes)
        if not ranks.all_gather("the best checkpoint", has_best)[0]:
            progress.forget_best()
        return Trainer(folder, state, listeners).run()


@contextmanager
def _joined(config: Config, ranks: RankGroup | None) -> Iterator[RankGroup]:
    """Join the ranks of a run, all of which have the same settings, and watch them."""
    ranks = ranks or RankGroup.join(config.mesh, config.run.device)
    with ranks.watched():
        check_batch(config, ranks.num_replicas)
        ranks.check_same("settings", to_dict(config))
        yield ranks


def _open_same_text(subject: Subject, run: RunDir) -> Text:
    """Open the data of a run that resumes."""
    try:
        text = subject.open_text(run.path)
    except DataError as error:
        place = {"train": "NEW-PLACE", "finetune": "--data NEW-PLACE"}[subject.config.kind]
        command = f"samo {subject.config.kind} {place} --resume {run.path}"
        raise DataError(f"{error}; if the text has moved, name it again: {command}") from None
    recorded = run.read_run().get("data")
    if not isinstance(recorded, dict) or recorded.get("fingerprint") != text.fingerprint():
        raise RunError(
            f"the text of '{run.path}' has changed, and a run resumes with the same text only; "
            "restore the old files, or start a new run. (If the tokens in its folder 'data' are "
            "damaged, remove it)"
        )
    return text


def subject_of(config: Config, run: RunDir | None = None) -> Subject:
    """Return the model and data of a run; ``run`` is its folder if it resumes."""
    if isinstance(config, FinetuneConfig):
        from samo.train.causal_lm_subject import CausalLMSubject  # what samo train does not need

        return CausalLMSubject(config, run)
    return GPTSubject(config)


def _remove_draft(out: Path) -> None:
    """Remove the folder of a run that ended before it began, with the tokens in it."""
    folder = RunDir(out)
    with suppress(RunError):  # another process may have taken it meanwhile
        folder.lock()
        if not folder.run_file.exists():
            shutil.rmtree(out, ignore_errors=True)
    folder.close()


class Trainer:
    """A run from its current step to its end: steps, pruning, validation, checkpoints, metrics."""

    def __init__(self, folder: RunDir, state: RunState, listeners: Iterable[Listener]) -> None:
        self.folder = folder
        self.subject = state.subject
        self.text = state.subject.text
        self.config: Config = state.subject.config
        self.learner, self.masking, self.batches = state.learner, state.masking, state.batches
        self.ranks = state.learner.ranks
        self.progress = progress = state.progress
        self.saver = Saver(folder, state)
        self.reporter = Reporter(listeners)
        self.report = self.reporter.on
        self.nonfinite_lines = 0
        self.saved_step = progress.step or None
        self.last_line = self.line

    def run(self) -> Result:
        """Train to the end, or until a signal arrives."""
        if self.learner.device.type == "cuda":  # not the peak of an earlier run in this process
            torch.cuda.reset_peak_memory_stats(self.learner.device)
        with closing(self.reporter):
            if self.ranks.is_first:
                step, size = self.progress.step, self.progress.metrics_bytes
                valid = None if step >= self.config.run.steps else size  # a complete run's are all
                run_id = str(self.folder.read_run().get("id", ""))
                self.reporter.open_files(
                    self.folder.path, step=step, size=valid, config=self.config, run_id=run_id
                )
            try:
                signal = self.fit()
            except BaseException as error:
                # Before the folder is released; but ranks that failed end no save.
                if self.ranks.size == 1 or not isinstance(error, RuntimeError):
                    with suppress(Exception):
                        self.finish_save()
                with suppress(RunError):
                    self.report(events.Ended(step=self.progress.step, reason="failed"))
                raise
            finally:
                staging.release()
        result = Result(
            folder=self.folder.path,
            step=self.progress.step,
            saved_step=self.saved_step,
            valid_loss=self.progress.valid_loss,
            signal=signal,
            ledger=self.learner.ledger(),
        )
        self.learner.close()
        self.ranks.leave()
        return result

    @property
    def is_valid(self) -> bool:
        """Whether the loss of the last validation, if there was one, is finite."""
        return self.progress.valid_loss is None or math.isfinite(self.progress.valid_loss)

    @property
    def line(self) -> tuple[int, int, float]:
        """What the next line of metrics counts from."""
        return self.progress.step, self.progress.tokens, self.progress.elapsed_s

    def fit(self) -> int | None:
        """Train, and generate a sample at the end; return the signal that interrupted it."""
        run, progress = self.config.run, self.progress
        first = progress.step
        start = events.Resumed if first else events.Started
        self.report(start(step=first, steps=run.steps, time=time.time()))
        if first:  # the run may have been killed before it did that
            self.ranks.run_on_rank0("the checkpoints", self.saver.follow_up)
        else:
            self.start_fresh()
        signal = self.loop()
        if progress.step < run.steps:
            self.report(events.Ended(step=progress.step, reason="interrupted"))
            return signal
        if not self.is_valid:
            raise self.diverged(f"its validation loss is {progress.valid_loss}")
        self.generate_sample()
        self.subject.finish(self.folder, self.learner)
        self.report(events.Ended(step=progress.step, reason="done"))
        return None

    def start_fresh(self) -> None:
        """Tell what is read; validate a model that comes pruned: the loss to compare with."""
        text, sequences = self.text, self.batches.num_windows
        tokens, valid_tokens = text.train.num_tokens, text.valid.num_tokens
        self.report(
            events.Opened(step=0, tokens=tokens, sequences=sequences, valid_tokens=valid_tokens)
        )
        if self.subject.reason:
            self.report(events.Chosen(step=0, reason=self.subject.reason))
        if (masks := self.learner.masks) is not None:
            kept, numel, sparsity = masks.kept, masks.numel, masks.sparsity
            self.report(
                events.Pruned(step=0, kept=kept, numel=numel, sparsity=sparsity, reason="masks")
            )
            self.evaluate()
            self.progress.forget_best()  # no checkpoint holds this model

    def loop(self) -> int | None:
        """Take steps until the last one or a signal, which is returned."""
        run, progress = self.config.run, self.progress
        signal: int | None = None
        with Interrupt() as interrupt:
            while progress.step < run.steps and signal is None:
                if self.masking is not None and self.masking.is_due(progress.step):
                    self.prune(self.masking)
                self.step()
                self.update_masks()
                self.report(events.Ticked(step=progress.step))
                is_last, is_best = progress.step >= run.steps, False
                if is_last:
                    self.report(self.learner.accounted(progress.step))
                    if (timeline := self.learner.timeline(progress.step)) is not None:
                        self.report(timeline)
                if is_last or progress.step % run.eval_every == 0:
                    is_best = self.evaluate()
                request = self.ranks.agree(progress.step, self.request(interrupt.signal))
                signal = int(request) if request.isdigit() else None
                if request == "finish" or (self.saver.is_done and not self.saver.has_failed):
                    self.finish_save()
                is_due = is_last or is_best or request == "save" or signal is not None
                # Of a model that may have diverged, or the last good checkpoint would go.
                is_good = self.is_valid if is_last else not self.nonfinite_lines
                if is_good and (is_due or progress.step % run.save_every == 0):
                    self.save()
                else:
                    self.saver.prepare()
            self.finish_save()
        return signal

    def request(self, signal: int | None) -> str:
        """Return what this rank asks all ranks to do: stop, save, or end as its save failed."""
        if self.saver.has_failed:
            return "finish"
        return str(signal) if signal is not None else "save" * self.saver.is_due

    def step(self) -> None:
        """Take one optimizer step, and write a line of metrics if one is due."""
        run, progress, learner = self.config.run, self.progress, self.learner
        if learner.will_compile:
            self.report(events.Compiling(step=progress.step))
        started = time.perf_counter()
        batches = [next(self.batches) for _ in range(run.accumulate)]
        step = progress.step + 1
        lr = learning_rate(step, run.steps, self.config.optim)
        loss = learner.backward(batches)
        norm = learner.step(lr)
        is_logged = step % run.log_every == 0 or step >= run.steps
        if is_logged:  # synchronizes device and ranks
            whole_loss, whole_norm = learner.whole_loss(loss), float(norm)
        progress.step = step
        progress.tokens += sum(batch.num_read for batch in batches)
        progress.elapsed_s += time.perf_counter() - started
        if progress.accounted != learner.phase:  # gradients and moments exist now
            progress.accounted = learner.phase
            self.report(learner.accounted(progress.step))
        if is_logged:
            self.log(whole_loss, whole_norm, lr)

    def prune(self, masking: Masking) -> None:
        """End the dense phase."""
        progress = self.progress
        if progress.step and progress.valid_step != progress.step:
            self.evaluate()  # the loss before pruning, to compare with
        masks, pruned = masking.draw(progress.step)
        try:
            self.learner.prune(masks)
        except SamoError:
            raise
        except ValueError as error:  # weights that are not finite, or too large for the dtype
            raise self.diverged(str(error)) from error
        masking.start_changing()
        self.report(pruned)
        progress.forget_best()  # dense losses do not count for a pruned model
        self.last_line = self.line  # nor do the times of dense steps
        if progress.step:
            self.saver.prepare()  # while it evaluates
            if self.evaluate():
                self.save()

    def update_masks(self) -> None:
        """Observe the masks of a dense model, or change those of a pruned one, if that is due."""
        progress = self.progress
        if self.masking is None or self.masking.is_idle:
            return
        self.synchronize()
        if (seen := self.masking.observe(progress.step)) is not None:
            self.report(seen)
        if (change := self.masking.change(progress.step)) is not None:
            self.report(change)
            if change.dropped != change.grown:  # the model is sparser
                progress.forget_best()
                progress.accounted = None

    def log(self, loss: float, norm: float, lr: float) -> None:
        """Write a line of metrics, and what each rank has sent."""
        progress = self.progress
        steps, tokens, seconds = (now - then for now, then in zip(self.line, self.last_line))
        self.last_line = self.line
        seconds = max(seconds, 1e-9)  # a damaged elapsed_s may be too large to add to
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
            raise self.diverged(f"no finite loss in {self.nonfinite_lines} lines of metrics")

    def diverged(self, how: str) -> RunError:
        """Return the error of a run that cannot recover."""
        return RunError(
            f"the run has diverged at step {self.progress.step:,}: {how}; start a new one with a "
            "lower --lr, a longer --warmup-steps, or --density-power 0"
        )

    def evaluate(self) -> bool:
        """Validate, and return whether the loss is the lowest so far."""
        progress = self.progress
        self.synchronize()
        loss = self.learner.evaluate(self.validation_batches(self.ranks.part))
        progress.valid_loss, progress.valid_step = loss, progress.step
        self.report(
            events.Evaluated(
                step=progress.step,
                valid_loss=loss,
                perplexity=math.exp(loss) if loss < 700 else math.inf,
                tokens=progress.tokens,
                elapsed_s=progress.elapsed_s,
            )
        )
        is_best = progress.best_loss is None or loss < progress.best_loss
        if is_best and math.isfinite(loss):
            progress.best_loss, progress.best_step = loss, progress.step
            progress.eval_batches = self.config.run.eval_batches
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

    def save(self) -> None:
        """Copy the state of the run; a thread writes it while training continues."""
        self.finish_save()
        self.synchronize()
        self.ranks.run_on_rank0("the run folder", self.folder.check_in_place)
        self.progress.metrics_bytes = self.reporter.metrics_bytes
        if not self.saver.save():
            self.finish_save()

    def finish_save(self) -> None:
        """Wait for the save that is on its way."""
        try:
            saved = self.saver.finish()
        except CheckpointError:
            self.folder.check_in_place()  # the better error, if the folder was moved meanwhile
            raise
        if saved is not None:
            self.saved_step = saved.step
            self.report(saved)

    def generate_sample(self) -> None:
        """Let the model continue a piece of the validation text, or answer an example of it."""
        run, ranks = self.config.run, self.ranks
        # With shards all ranks run the model; otherwise rank 0 alone.
        runs_model = ranks.is_first or self.config.mesh.shard == "weights"
        if not run.sample_tokens or ranks.num_stages > 1 or not runs_model:
            return
        valid = self.text.valid
        if isinstance(valid, Examples) and (asked := valid.prompt()) is not None:
            prompt_T = torch.from_numpy(asked).long()
        else:
            batch = next(self.validation_batches((0, 1)))
            places = (batch.targets_BT[0] != IGNORE).nonzero()  # padding follows the last of them
            num_tokens = int(places.max()) + 1 if places.numel() else 1
            prompt_T = batch.inputs_BT[0, : min(num_tokens, _PROMPT_TOKENS)]
        try:
            with self.learner.in_eager():  # every token is a new shape
                tokens_T = self.subject.sample(self.learner, prompt_T)
        except KeyboardInterrupt:  # everything is saved; the sample is left out
            return
        except CheckpointError as error:
            _log.warning("no sample: %s", error)
            return
        if ranks.is_first:
            decode, length = self.text.tokenizer.decode, len(prompt_T)
            prompt, text = (decode(t.numpy()) for t in (tokens_T[:length], tokens_T[length:]))
            self.report(events.Sampled(step=self.progress.step, prompt=prompt, text=text))

    def synchronize(self) -> None:
        """Wait for queued kernels, so that their time counts as training time."""
        if self.learner.device.type == "cuda":
            started = time.perf_counter()
            torch.cuda.synchronize(self.learner.device)
            self.progress.elapsed_s += time.perf_counter() - started
