"""Rows of a file with one JSON object a line, which may come from a stranger."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from samo.errors import DataError
from samo.utils import untrusted

__all__ = []

_MAX_LINE_BYTES: Final = 2**26
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with their lines, from 1. Blank lines are passed over."""
    try:
        with path.open("rb") as file:
            number = 0
            # One line is held at a time, and of a longer one no more than the limit.
            while line := file.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if line.strip():
                    yield number, _parse(line, f"data file '{path}', line {number:,}")
    except OSError as error:
        raise DataError(f"data file '{path}' cannot be read: {error.strerror}") from None


def _parse(line: bytes, place: str) -> Any:
    if len(line) > _MAX_LINE_BYTES:
        raise DataError(
            f"{place} has more than {_MAX_LINE_BYTES:,} bytes; put each example on a line of its "
            "own, and a long text into a .txt file"
        )
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place} is not UTF-8: its byte {error.start:,} is 0x{line[error.start]:02x}; convert "
            "the file (iconv -t utf-8)"
        ) from None
    if 0 in line:  # in UTF-16, perhaps, which json would guess
        raise DataError(f"{place} is not text: its byte {line.index(0):,} is NUL")
    try:
        return untrusted.parse_json(line)
    except ValueError as error:
        raise DataError(
            f"{place} cannot be read as JSON: {error}; each line must be one JSON object"
        ) from None
