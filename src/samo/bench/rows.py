"""The results of a measurement: a folder with rows and a page.

rows.jsonl    one JSON object for each measurement, failed ones too
README.md     command, hardware, date, and the table

Both are replaced after each part of a measurement, so that an interrupted one keeps its results.
"""

import dataclasses
import datetime
import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from samo.bench.timing import spread
from samo.errors import RunError
from samo.utils import atomic_io
from samo.utils.environment import hardware, versions
from samo.utils.formatting import NOTHING, size

__all__ = ["Row"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement, or why there is none."""

    name: str
    """The operation or the contender."""
    parameters: Mapping[str, Any]
    """What it was measured with: sizes, density, type."""
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    repeats: int = 0
    """Number of times behind median and percentiles."""
    unit: str = "ms"
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further measurements: bytes, ratios, losses."""
    failure: str | None = None
    """Why there is no median."""

    @classmethod
    def timed(
        cls,
        name: str,
        parameters: Mapping[str, Any],
        times_ms: Sequence[float],
        figures: Mapping[str, Any],
    ) -> "Row":
        """Return the row of some times."""
        times: dict[str, Any] = {**spread(times_ms), "repeats": len(times_ms)}
        return cls(name=name, parameters=parameters, figures=figures, **times)


class Table(NamedTuple):
    """A table to show: the first column names a row, the others are numbers."""

    head: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]


Save = Callable[[Sequence[Row]], None]
Say = Callable[[str], None]


class Results:
    """The folder of one measurement.

    Args:
        folder: Created if missing.
        name: Name of the measurement.
        command: The command line.
        device: Where it is measured.
        tabulate: Makes the table of rows.
        notes: Explanations of the table.

    Raises:
        RunError: The folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        command: str,
        device: torch.device,
        tabulate: Callable[[Sequence[Row]], Table],
        notes: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.name = name
        self._command = command
        self._tabulate = tabulate
        self._notes = notes
        self._hardware = hardware(device)
        self._environment = environment(device)
        self._write("README.md", "")  # fail before hours of measurement, not after

    def save(self, rows: Sequence[Row]) -> None:
        """Write rows and page.

        Raises:
            RunError: The folder cannot be written to.
        """
        lines = [
            json.dumps({"bench": self.name, **dataclasses.asdict(row), **self._environment})
            for row in rows
        ]
        self._write("rows.jsonl", "".join(f"{line}\n" for line in lines))
        self._write("README.md", self._page(rows))

    def _page(self, rows: Sequence[Row]) -> str:
        machine, found = self._hardware, self._environment
        named = ", ".join(f"{package} {number}" for package, number in found["versions"].items())
        notes = [
            f"Measured {found['date']} on {machine['device_name']} "
            f"({size(machine['memory_bytes'])}), {machine['cores']} CPU cores.",
            f"Versions: {named}; commit {found['commit'] or 'unknown'}.",
            *self._notes,
        ]
        parts = [
            f"# samo bench {self.name}",
            f"    {self._command}",
            "\n".join(f"- {note}" for note in notes),
            markdown(self._tabulate(rows)).rstrip(),
        ]
        if missing := failures(rows):
            parts += ["Not measured:", "\n".join(f"- {entry}" for entry in missing)]
        return "\n\n".join([*parts, "Every number, with its spread: rows.jsonl."]) + "\n"

    def _write(self, name: str, text: str) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_io.write_bytes(self.folder / name, text.encode())
        except OSError as error:
            raise RunError(
                f"cannot write to '{self.folder}': {error.strerror}; choose another folder with "
                "--out"
            ) from None


def failures(rows: Sequence[Row]) -> list[str]:
    """Return what could not be measured, each reason once.

    Example:
        >>> from samo.bench.rows import Row, failures
        >>> failures([Row(name="copy", parameters={}, failure="out of memory")] * 2)
        ['copy: out of memory (2 times)']
    """
    found: dict[str, int] = {}
    for row in rows:
        if row.failure is not None:
            entry = f"{row.name}: {row.failure}"
            found[entry] = found.get(entry, 0) + 1
    return [entry if n == 1 else f"{entry} ({n} times)" for entry, n in found.items()]


def reason(error: BaseException) -> str:
    """Return the first line of an error, for a row."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {str(error).partition('. ')[0]}"
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


def markdown(table: Table) -> str:
    """Return a table as Markdown."""
    rows = [table.head, ("---",) * len(table.head), *table.lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def digits(value: float | None) -> str:
    """Write a number with three digits, small ones too.

    Example:
        >>> from samo.bench.rows import digits
        >>> digits(0.00512), digits(1.0), digits(341.234), digits(None)
        ('0.00512', '1.00', '341', '-')
    """
    if value is None:
        return NOTHING
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"
    return text.replace(".e", "e")


def between(row: Row) -> str:
    """Write the 20th and the 80th percentile of a row."""
    return NOTHING if row.median is None else f"{digits(row.p20)}-{digits(row.p80)}"


def environment(device: torch.device) -> dict[str, Any]:
    """Return where and when a row was measured: device, versions, date and commit."""
    return {
        "device": device.type,
        "device_name": hardware(device)["device_name"],
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of this checkout, with "-dirty" if files differ; None outside of one."""
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    top = git("rev-parse", "--show-toplevel")
    # An installed samo may lie in the repository of another project.
    if top is None or Path(top).resolve() / "src" / "samo" != package:
        return None
    return git("describe", "--always", "--dirty", "--exclude", "*")


def slug(text: str) -> str:
    """Return a short name for a path.

    Example:
        >>> from samo.bench.rows import slug
        >>> slug("NVIDIA H200"), slug("AMD EPYC 9R14 @ 2.60GHz 96-Core Processor")
        ('nvidia-h200', 'amd-epyc-9r14-2-60ghz')
    """
    whole = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return whole if len(whole) <= 24 else whole[:24].rpartition("-")[0] or whole[:24]
