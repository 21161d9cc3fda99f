"""The thread that writes the checkpoints of a run."""

import time
from collections.abc import Callable
from concurrent.futures import Future

from samo.checkpoint import copy, read_manifest, staging
from samo.checkpoint.save import prepare
from samo.train.events import Phase, Saved
from samo.train.run_dir import RunDir
from samo.train.run_state import RunState


class Saver:
    """Writes ``last`` in a thread, and on rank 0 what follows from it: ``best``, those to keep."""

    def __init__(self, folder: RunDir, state: RunState) -> None:
        self.folder = folder
        self._state = state
        self._run = state.subject.config.run
        self._started = time.monotonic()
        self._saving: Future[Saved] | None = None
        self._prepared: Phase | None = None

    @property
    def is_due(self) -> bool:
        """Whether ``save_minutes`` have passed since the last save."""
        return 0 < 60 * self._run.save_minutes <= time.monotonic() - self._started

    @property
    def is_done(self) -> bool:
        """Whether a save has ended, and `finish` has not returned it yet."""
        return self._saving is not None and self._saving.done()

    @property
    def has_failed(self) -> bool:
        """Whether the save that is done has failed, which `finish` raises."""
        return self.is_done and self._saving is not None and self._saving.exception() is not None

    @property
    def _is_async(self) -> bool:
        # A copy of dense state would nearly double the memory of a run on a CPU.
        return self._state.learner.phase == "samo" or self._state.learner.device.type != "cpu"

    def prepare(self) -> None:
        """Take memory for the copies of a phase, in a thread, before its first save."""
        learner = self._state.learner
        if self._is_async and self._prepared != learner.phase and self._saving is None:
            prepare(learner.whole, learner.opt, mesh=learner.ranks.mesh)
            self._prepared = learner.phase

    def save(self) -> bool:
        """Copy the state and write it in a thread; return whether training may continue.

        If not, `finish` follows at once. The save before must be finished.
        """
        assert self._saving is None, "its result would be lost"
        started, step = time.perf_counter(), self._state.progress.step
        self._started = time.monotonic()
        learner, is_async = self._state.learner, self._is_async
        self._prepared = learner.phase

        def staged() -> Callable[[], Saved]:
            write = self._state.stage(self.folder.last, copies=is_async)
            stall_s = time.perf_counter() - started

            def complete() -> Saved:
                write()
                num_bytes = 0
                if learner.ranks.is_first:
                    self.follow_up()
                    files = [file for file in self.folder.last.rglob("*") if file.is_file()]
                    num_bytes = sum(file.stat().st_size for file in files)
                seconds = time.perf_counter() - started
                return Saved(
                    step=step,
                    path=self.folder.last.relative_to(self.folder.path).as_posix(),
                    bytes=num_bytes,
                    seconds=seconds,
                    stall_s=stall_s if is_async else seconds,
                )

            return complete

        self._saving = staging.submit(staged)
        return is_async

    def finish(self) -> Saved | None:
        """Wait for the save that is on its way, and return it, or raise its error."""
        saving, self._saving = self._saving, None
        return None if saving is None else saving.result()

    def follow_up(self) -> None:
        """Copy ``last`` to ``best`` and ``step-N`` if its manifest says so; safe to repeat."""
        folder = self.folder
        folder.check_in_place()
        progress = read_manifest(folder.last).extra["progress"]
        step = progress["step"]
        if progress.get("best_step") == step:
            copy(folder.last, folder.best)
        keep = self._run.keep if self._run.keep > 1 else 0  # the last one is kept as it is
        if keep:
            copy(folder.last, folder.kept(step))
        folder.remove_kept(all_but=keep)
