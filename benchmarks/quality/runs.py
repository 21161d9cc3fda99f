"""Runs of contenders with seeds: side by side in processes, each kept as a row, none done twice."""

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import Row, read_lines, write_lines
from samo.bench.rows import environment, reason
from samo.errors import RunError
from samo.utils import atomic_io

__all__ = ["Job", "Kept", "Plan", "Row", "finish", "kept_rows"]


class Job(NamedTuple):
    """One run."""

    contender: str
    seed: int
    lr: float

    def __str__(self) -> str:
        return f"{self.contender} (seed {self.seed}, rate {self.lr:g})"


Plan = Callable[[list[Row]], list[Job]]
"""Returns the runs that are wanted, first those to begin first, given the rows that are there."""


class Kept:
    """The rows of a folder. All of them have the same settings, so that they can be compared."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None) -> None:
        self._path = folder / "rows.jsonl"
        self.settings = settings
        self.rows = read_lines(self._path) if self._path.exists() else []
        for row in self.rows:
            if settings is not None and row["settings"] != settings:
                differing = ", ".join(
                    f"{key} {row['settings'].get(key)!r} and now {settings.get(key)!r}"
                    for key in sorted({*settings, *row["settings"]})
                    if row["settings"].get(key) != settings.get(key)
                )
                raise RunError(
                    f"'{self._path}' has rows of other settings ({differing}), which cannot be compared; "
                    "choose another folder with --out"
                )

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        """Return the jobs that have no row yet."""
        done = {Job(row["contender"], row["seed"], row["lr"]) for row in self.rows}
        return [job for job in jobs if job not in done]

    def add(self, row: Row) -> None:
        """Keep a row, whatever happens afterwards."""
        self.rows.append(row)
        write_lines(self._path, self.rows)


@contextmanager
def kept_rows(folder: Path, settings: Any) -> Iterator[Kept]:
    """Open the rows of a folder, made if it is not there; ``settings`` is a dataclass, or None for any.

    Raises:
        RunError: Another process writes to it, or its rows have other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_io.locked(folder):
            # As JSON gives them back: rows are compared with those of earlier calls.
            plain = None if settings is None else dataclasses.asdict(settings)
            yield Kept(folder, None if plain is None else json.loads(json.dumps(plain)))
    except BlockingIOError:
        raise RunError(
            f"another process writes to '{folder}'; wait for it, or choose another folder with --out"
        ) from None


def finish(
    kept: Kept,
    plan: Plan,
    work: Callable[[Job], Row],
    *,
    device: torch.device,
    parallel: int = 1,
    minutes: float | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Do all jobs of a plan that have no row yet, and keep a row of each as soon as it is done.

    Args:
        kept: Where rows go.
        plan: Asked for what is wanted again after each row: it may depend on what was found.
        work: Does one; a function that another process can import, if several work in parallel.
        device: Where it is done, for the rows.
        parallel: Jobs at a time, each in a process of its own; one alone is done in this process.
        minutes: After which no job is begun that would end later, going by the slowest so far.
        say: Called with a line about every job.

    Raises:
        RunError: Some jobs failed; the others have their rows.
    """
    begun = time.monotonic()
    slowest, failures, begun_jobs = 0.0, [], set[Job]()
    about = environment(device)
    executor: Executor = ThreadPoolExecutor(1)
    if parallel > 1:  # CUDA does not survive a fork
        executor = ProcessPoolExecutor(parallel, multiprocessing.get_context("spawn"))
    running: dict[Future[Row], tuple[Job, float]] = {}
    try:
        while True:
            waiting = [job for job in kept.missing(plan(kept.rows)) if job not in begun_jobs]
            now = time.monotonic()
            is_late = minutes is not None and now - begun + slowest > 60 * minutes
            while waiting and len(running) < parallel and not is_late:
                job = waiting.pop(0)
                begun_jobs.add(job)
                running[executor.submit(work, job)] = (job, now)
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job, started = running.pop(future)
                error = future.exception()
                if error is not None:
                    failures.append(f"{job}: {reason(error)}")
                    say(f"failed: {failures[-1]}")
                    continue
                took_s = time.monotonic() - started
                slowest = max(slowest, took_s)
                shared = {"settings": kept.settings, "parallel": parallel, "took_s": took_s}
                kept.add(future.result() | shared | about)
                say(f"done: {job} in {took_s:.0f} s, {len(waiting)} more known to come")
        if waiting:
            say(f"{len(waiting)} runs are left for the next call: {', '.join(map(str, waiting))}")
    finally:
        executor.shutdown(cancel_futures=True)
    if failures:
        raise RunError(f"{len(failures)} runs failed: {'; '.join(failures)}")
