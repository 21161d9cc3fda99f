"""The tables in `data`: numbers of the SAMO and AxoNN papers, each file with its source."""

import csv
from pathlib import Path
from typing import Final

_DATA: Final = Path(__file__).parent / "data"

Row = dict[str, str | float | None]


def read(name: str) -> list[Row]:
    """Return the rows of a table, numbers as floats and empty cells as None."""
    lines = (_DATA / f"{name}.csv").read_text().splitlines()
    return [
        {key: _value(text) for key, text in row.items()}
        for row in csv.DictReader(line for line in lines if not line.startswith("#"))
    ]


def source(name: str) -> str:
    """Return where a table is from, and whether it was printed or digitised."""
    lines = (_DATA / f"{name}.csv").read_text().splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


def _value(text: str) -> str | float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return text
