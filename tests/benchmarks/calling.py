"""Call the main function of a benchmark as from a shell."""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from benchmarks.measure import Row, read_lines


def call(main: Callable[[], object], *arguments: object) -> None:
    with mock.patch.object(sys, "argv", ["benchmark", *map(str, arguments)]):
        main()


def rows_of(main: Callable[[], object], out: Path, *arguments: object) -> list[Row]:
    """Return the rows that a benchmark writes to a file."""
    call(main, *arguments, "--out", out)
    return read_lines(out)
