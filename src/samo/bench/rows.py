"""What a measurement leaves behind: a folder with rows, a table and figures.

rows.jsonl    one JSON object for each thing that was measured, or that could not be
README.md     command, hardware, date, and the table
NAME.png      the figure, and NAME.svg

Rows and page are written anew after each part of a measurement, so that what was measured stays when it
is stopped.
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
    """One thing that was measured, or that could not be.

    Example:
        >>> from samo.bench.rows import Row
        >>> Row(name="expand", parameters={"numel": 2048}, median=1.5, p20=1.4, p80=1.7, repeats=9).unit
        'ms'
    """

    name: str
    """The operation or the contender."""
    parameters: Mapping[str, Any]
    """What it was measured with: sizes, density, type."""
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    repeats: int = 0
    """How many times stand behind median and percentiles."""
    unit: str = "ms"
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else was measured, or follows: bytes, ratios, losses."""
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
        """Return the row of some times.

        Example:
            >>> from samo.bench.rows import Row
            >>> Row.timed("copy", {"numel": 2048}, [1.0, 3.0, 2.0], {}).median
            2.0
        """
        found = spread(times_ms)
        return cls(
            name=name,
            parameters=parameters,
            median=found["median"],
            p20=found["p20"],
            p80=found["p80"],
            repeats=len(times_ms),
            figures=figures,
        )


class Table(NamedTuple):
    """Rows as people read them: the first column says what it is, the others are numbers."""

    head: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]


Save = Callable[[Sequence[Row]], None]
Say = Callable[[str], None]


class Results:
    """The folder of one measurement.

    Args:
        folder: Where to; made if it is not there.
        name: Of the measurement, and of its figures.
        command: What was typed.
        device: Where it is measured.
        tabulate: Makes the table of some rows.
        notes: What must be known to read the table.
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
        self._about = hardware(device)
        self._environment = environment(device)
        self._has_figure = False
        self._writes("README.md", b"")  # before hours are spent on what could not be written

    def save(self, rows: Sequence[Row]) -> None:
        """Write rows and page as far as they have come.

        Raises:
            RunError: The folder cannot be written to.
        """
        lines = [
            json.dumps({"bench": self.name, **dataclasses.asdict(row), **self._environment})
            for row in rows
        ]
        self._writes("rows.jsonl", "".join(f"{line}\n" for line in lines).encode())
        self._writes("README.md", self._page(rows).encode())

    def add_figure(self, rows: Sequence[Row], png: bytes, svg: str) -> None:
        """Write the figure, in both formats, and the page once more with it.

        Raises:
            RunError: The folder cannot be written to.
        """
        self._writes(f"{self.name}.png", png)
        self._writes(f"{self.name}.svg", svg.encode())
        self._has_figure = True
        self.save(rows)

    def _page(self, rows: Sequence[Row]) -> str:
        about = self._about
        found = self._environment
        parts = [
            f"# samo bench {self.name}",
            f"    {self._command}",
            f"- Measured {found['date']} on {about['device_name']} ({size(about['memory_bytes'])}), "
            f"{about['cores']} CPU cores.",
            "- Versions: "
            + ", ".join(f"{package} {number}" for package, number in found["versions"].items())
            + f"; commit {found['commit'] or 'unknown'}.",
            *(f"- {note}" for note in self._notes),
        ]
        text = "\n\n".join(parts[:2]) + "\n\n" + "\n".join(parts[2:]) + "\n\n"
        text += markdown(self._tabulate(rows))
        missing = failures(rows)
        if missing:
            text += "\nNot measured:\n\n" + "".join(f"- {entry}\n" for entry in missing)
        if self._has_figure:
            text += f"\n![The table as a figure]({self.name}.png)\n"
        return text + "\nEvery number, with its spread: rows.jsonl.\n"

    def _writes(self, name: str, data: bytes) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_io.write_bytes(self.folder / name, data)
        except OSError as error:
            raise RunError(
                f"cannot write to '{self.folder}': {error.strerror}; choose another folder with --out"
            ) from None


def failures(rows: Sequence[Row]) -> list[str]:
    """Return what could not be measured, with the reasons, each once.

    Example:
        >>> from samo.bench.rows import Row, failures
        >>> failures([Row(name="torchao", parameters={}, failure="not installed")])
        ['torchao: not installed']
    """
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.failure is not None:
            where = ", ".join(f"{key} {value}" for key, value in row.parameters.items())
            found.setdefault(f"{row.name}: {row.failure}", []).append(where)
    return [
        reason if len(places) == 1 else f"{reason} ({len(places)} times)"
        for reason, places in found.items()
    ]


def reason(error: BaseException) -> str:
    r"""Return the first line of an error, for a row.

    Example:
        >>> from samo.bench.rows import reason
        >>> reason(RuntimeError("no kernel for this type\nCPU: none"))
        'no kernel for this type'
    """
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {str(error).partition('. ')[0]}"
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


def markdown(table: Table) -> str:
    """Return a table as Markdown.

    Example:
        >>> from samo.bench.rows import Table, markdown
        >>> print(markdown(Table(("name", "ms"), [("copy", "1.0")])), end="")
        | name | ms |
        | --- | --- |
        | copy | 1.0 |
    """
    rows = [table.head, ("---",) * len(table.head), *table.lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def digits(value: float | None, unit: str = "") -> str:
    """Write a number with three digits, small ones too.

    Example:
        >>> from samo.bench.rows import digits
        >>> digits(0.00512), digits(1.0), digits(341.234), digits(None)
        ('0.00512', '1.00', '341', '-')
    """
    if value is None:
        return NOTHING
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"
    return f"{text}{unit}".replace(".e", "e")


def between(row: Row) -> str:
    """Write the 20th and the 80th percentile of a row.

    Example:
        >>> from samo.bench.rows import Row, between
        >>> between(Row(name="copy", parameters={}, median=1.0, p20=0.5, p80=1.5))
        '0.500-1.50'
    """
    return NOTHING if row.median is None else f"{digits(row.p20)}-{digits(row.p80)}"


def environment(device: torch.device) -> dict[str, Any]:
    """Return what every row says of where and when it was measured.

    Example:
        >>> import torch
        >>> from samo.bench.rows import environment
        >>> sorted(environment(torch.device("cpu")))
        ['commit', 'date', 'device', 'device_name', 'versions']
    """
    return {
        "device": device.type,
        "device_name": hardware(device)["device_name"],
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit that samo is run from, "-dirty" if files differ from it; None outside of a checkout.

    Example:
        >>> from samo.bench.rows import commit
        >>> commit() is None or len(commit()) >= 7
        True
    """
    package = Path(__file__).resolve().parents[1]

    def ask(*question: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *question], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    top = ask("rev-parse", "--show-toplevel")
    # An installed samo may lie in the repository of somebody else.
    if top is None or Path(top).resolve() / "src" / "samo" != package:
        return None
    return ask("describe", "--always", "--dirty", "--exclude", "*")


def slug(text: str) -> str:
    """Return a name that can stand in a path.

    Example:
        >>> from samo.bench.rows import slug
        >>> slug("NVIDIA H200"), slug("AMD EPYC 9R14 @ 2.60GHz 96-Core Processor")
        ('nvidia-h200', 'amd-epyc-9r14-2-60ghz')
    """
    whole = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return whole if len(whole) <= 24 else whole[:24].rpartition("-")[0] or whole[:24]
