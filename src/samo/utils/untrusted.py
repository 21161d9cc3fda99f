"""Files from strangers are data: what is read has a limit, and links are not followed."""

import json
import os
import stat
from typing import Any, Final

MAX_VALUES: Final = 2**19
"""Most values in JSON. Each may take 100 bytes of memory, and two of text."""


def check_file(path: str | os.PathLike[str]) -> os.stat_result:
    """Return the status of a file; raise ValueError for links, pipes, devices and folders."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        is_link = stat.S_ISLNK(found.st_mode)
        raise ValueError("it is a link (cp -rL copies files)" if is_link else "it is not a file")
    return found


def read_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return the bytes of a file; raise ValueError if it is not one, or is too large."""
    data = b""
    size = check_file(path).st_size
    if size <= max_bytes:
        with open(path, "rb") as stream:
            data = stream.read(max_bytes + 1)  # it may have grown
    if max(size, len(data)) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return data


def read_end(path: str | os.PathLike[str], num_bytes: int) -> bytes:
    """Return the last bytes of a file, from the start of a line; raise ValueError if it is none."""
    start = check_file(path).st_size - num_bytes
    with open(path, "rb") as stream:
        if start > 0:
            stream.seek(start - 1)  # the line feed before a whole line
        data = stream.read(num_bytes + 1)
    return data.partition(b"\n")[2] if start > 0 else data


def num_values(text: bytes) -> int:
    """Return at least the number of values in JSON, without parsing it."""
    return sum(map(text.count, (b",", b"[", b"{")))


def parse_json(text: bytes) -> Any:
    """Parse JSON; raise ValueError if it is none, nested too deep, or has too many values."""
    if num_values(text) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
