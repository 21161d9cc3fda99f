"""Checkpoints of a run, written by a thread while training continues."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from samo.checkpoint import copy, staging
from samo.checkpoint.load import load_masks
from samo.train.events import Saved
from samo.train.run_dir import RunDir

__all__ = []


class Saver:
    """Writes ``last``, and on rank 0 what follows from it: ``best`` and the ones to keep."""

    def __init__(self, folder: RunDir, *, is_first: bool, keep: int, minutes: float) -> None:
        self._folder: Final = folder
        self._is_first: Final = is_first
        self._keep: Final = keep
        self._every_s: Final = 60 * minutes
        self._started = time.monotonic()
        self._saving: Future[Saved] | None = None

    @property
    def is_due(self) -> bool:
        """Whether so many minutes have passed since the last save."""
        return 0 < self._every_s <= time.monotonic() - self._started

    @property
    def is_done(self) -> bool:
        """Whether a save has ended, and `finish` has not returned it yet."""
        return self._saving is not None and self._saving.done()

    @property
    def has_failed(self) -> bool:
        """Whether the save that is done has failed, which `finish` raises."""
        return self.is_done and self._saving is not None and self._saving.exception() is not None

    def save(
        self,
        stage: Callable[[], Callable[[], None]],
        step: int,
        *,
        is_best: bool,
        writes_masks: bool,
        is_async: bool,
    ) -> None:
        """Copy the state with ``stage``, and write it in a thread; `finish` the one before first.

        ``writes_masks`` writes the run's mask file too, from the checkpoint. If it is not
        asynchronous, ``stage`` need not copy, and `finish` follows at once.
        """
        assert self._saving is None, "its result would be lost"
        started = time.perf_counter()
        self._started = time.monotonic()

        def staged() -> Callable[[], Saved]:
            write = stage()
            stall_s = time.perf_counter() - started

            def complete() -> Saved:
                write()
                if self._is_first:
                    self._follow_up(step, is_best=is_best, writes_masks=writes_masks)
                last, seconds = self._folder.last, time.perf_counter() - started
                return Saved(
                    step=step,
                    path=last.relative_to(self._folder.path).as_posix(),
                    bytes=sum(file.stat().st_size for file in last.rglob("*") if file.is_file()),
                    seconds=seconds,
                    stall_s=stall_s if is_async else seconds,
                )

            return complete

        self._saving = staging.submit(staged)

    def finish(self) -> Saved | None:
        """Wait for the save that is on its way, and return it, or raise its error."""
        saving, self._saving = self._saving, None
        return None if saving is None else saving.result()

    def _follow_up(self, step: int, *, is_best: bool, writes_masks: bool) -> None:
        folder = self._folder
        if is_best:
            copy(folder.last, folder.best)
        if writes_masks:
            load_masks(folder.last).save(folder.masks)
        if self._keep > 1:
            copy(folder.last, folder.kept(step))
            folder.remove_kept(all_but=self._keep)
