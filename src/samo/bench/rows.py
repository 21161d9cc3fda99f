"""The results of a measurement: a folder with rows and a page.

rows.jsonl    one JSON object for each measurement, failed ones too
README.md     command, hardware, date, and the table

Both are replaced after each part of a measurement, so that an interrupted one keeps its results.
"""

import dataclasses
import datetime
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from samo.bench.timing import spread
from samo.errors import RunError
from samo.utils import atomic_io
from samo.utils.environment import hardware, versions
from samo.utils.formatting import NOTHING, size, three_digits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement, or why there is none."""

    name: str  # of the operation or the contender
    parameters: Mapping[str, Any]  # sizes, density, type
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    repeats: int = 0  # number of times behind median and percentiles
    unit: str = "ms"
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # bytes, ratios, losses
    failure: str | None = None  # why there is no median

    @classmethod
    def timed(cls, times_ms: Sequence[float], **fields: Any) -> "Row":
        """Return the row of some times."""
        return cls(**fields, **dict[str, Any](spread(times_ms)), repeats=len(times_ms))


class Table(NamedTuple):
    """A table: the first column names a row, the others are numbers."""

    head: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]


Save = Callable[[Sequence[Row]], None]
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """The folder of one measurement; created if missing, RunError if it cannot be written."""

    folder: Path
    _: dataclasses.KW_ONLY
    name: str
    command: str
    device: torch.device
    tabulate: Callable[[Sequence[Row]], Table]
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._write("README.md", "")  # fail before hours of measurement, not after

    def save(self, rows: Sequence[Row]) -> None:
        """Write rows and page."""
        found = environment(self.device)
        lines = [{"bench": self.name, **dataclasses.asdict(row), **found} for row in rows]
        self._write("rows.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
        self._write("README.md", self._page(rows, found))

    def _page(self, rows: Sequence[Row], found: Mapping[str, Any]) -> str:
        machine = hardware(self.device)
        named = ", ".join(f"{package} {number}" for package, number in found["versions"].items())
        notes = [
            f"Measured {found['date']} on {machine['device_name']} "
            f"({size(machine['memory_bytes'])}), {machine['cores']} CPU cores.",
            f"Versions: {named}; commit {found['commit'] or 'unknown'}.",
            *self.notes,
        ]
        parts = [
            f"# samo bench {self.name}",
            f"    {self.command}",
            "\n".join(f"- {note}" for note in notes),
            markdown(self.tabulate(rows)).rstrip(),
        ]
        if missing := failures(rows):
            parts += ["Not measured:", "\n".join(f"- {entry}" for entry in missing)]
        return "\n\n".join([*parts, "Every number, with its spread: rows.jsonl."]) + "\n"

    def _write(self, name: str, text: str) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_io.write_bytes(self.folder / name, text.encode())
        except OSError as error:
            message = f"cannot write to '{self.folder}': {error.strerror}"
            raise RunError(f"{message}; choose another folder with --out") from None


def failures(rows: Sequence[Row]) -> list[str]:
    """Return what could not be measured, each reason once."""
    found = Counter(f"{row.name}: {row.failure}" for row in rows if row.failure is not None)
    return [entry if n == 1 else f"{entry} ({n} times)" for entry, n in found.items()]


def reason(error: BaseException) -> str:
    """Return the first line of an error, for a row."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {str(error).partition('. ')[0]}"
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


def markdown(table: Table) -> str:
    rows = [table.head, ("---",) * len(table.head), *table.lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def between(row: Row) -> str:
    """Return the 20th and the 80th percentile of a row."""
    return NOTHING if row.median is None else f"{three_digits(row.p20)}-{three_digits(row.p80)}"


def environment(device: torch.device) -> dict[str, Any]:
    """Return where and when a row was measured: machine, versions, date and commit."""
    machine = hardware(device)
    return {
        **{key: machine[key] for key in ("device", "device_name", "cores", "threads")},
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of this checkout, with "-dirty" if files differ; None outside of one."""
    package = Path(__file__).resolve().parents[1]
    root = package.parents[1]
    # An installed samo may lie in the repository of another project.
    if package != root / "src" / "samo" or not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
