"""Ways to damage or forge a file."""

import json
import math
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from benchmarks.faults.cases import Case, seal

HOSTILE: Final[list[Any]] = [
    *(None, True, False, 0, -1, 1, 0.5, -0.5, 1e308, math.nan, math.inf, 2**31, 2**63, 2**70),
    *(10**400, "", "x", "../../outside/victim", "/etc/passwd", "\x1b[2J", "\ud800", "9" * 5000),
    *("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", [], {}, [[]], [0] * 1000, {"": {}}),
    *({"$tensor": "x"}, {"$tensor": ["F32", []]}, {"$float": "nan"}, {"$tuple": []}, {"$x": 1}),
    *("float64", "dense", "samo", -(2**63), [None], [-1], ["x"], "x" * 100_000),
]


def damage(path: Path, case: Case, draw: random.Random, *, is_sealed: bool) -> str:
    """Damage one of the files, and return how."""
    files = sorted(file for file in path.glob(case.damaged) if file.is_file())
    manifests = [file for file in files if file.name == "manifest.json"]
    file = draw.choice(manifests if manifests and draw.random() < 0.5 else files)
    acts = [flip, cut, grow, zero] + [hostile] * (4 * (file.suffix in (".json", ".jsonl")))
    if file.suffix == ".safetensors":
        acts += [header] * 3
    # Where a folder is a stranger's; a file that the user names may be a link or a pipe.
    can_link = "*" in case.damaged
    act = replace_file if can_link and draw.random() < 0.04 else draw.choice(acts)
    if is_sealed and file.name == "manifest.json":
        act = hostile
    with suppress(ValueError, RecursionError):
        act(file, draw)
    if is_sealed:
        with suppress(ValueError, RecursionError):
            seal((manifests or [file])[0].parent)
    return f"{act.__name__} {file.relative_to(path)}"


def edit(
    change: Callable[[bytearray, random.Random], None],
) -> Callable[[Path, random.Random], None]:
    def act(file: Path, draw: random.Random) -> None:
        data = bytearray(file.read_bytes())
        change(data, draw)
        file.write_bytes(data)

    act.__name__ = change.__name__
    return act


@edit
def flip(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 8)):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


@edit
def cut(data: bytearray, draw: random.Random) -> None:
    start = draw.randint(0, len(data))
    del data[start : draw.choice((len(data), start + draw.randint(1, 100)))]


@edit
def grow(data: bytearray, draw: random.Random) -> None:
    place = draw.choice((len(data), draw.randint(0, len(data))))
    data[place:place] = draw.randbytes(draw.randint(1, 1000))


@edit
def zero(data: bytearray, draw: random.Random) -> None:
    start = draw.randint(0, len(data))
    stop = min(len(data), start + draw.randint(1, 4096))
    data[start:stop] = bytes(stop - start)


def hostile(file: Path, draw: random.Random) -> None:
    """Replace a value in JSON, or in one line of it."""
    lines = file.read_bytes().splitlines() if file.suffix == ".jsonl" else [file.read_bytes()]
    place = draw.randrange(len(lines))
    lines[place] = json.dumps(replaced(json.loads(lines[place]), draw)).encode()
    file.write_bytes(b"\n".join(lines) + b"\n" * (file.suffix == ".jsonl"))


def header(file: Path, draw: random.Random) -> None:
    """Replace a value in the header of a safetensors file, or in the JSON in its metadata."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    content = json.loads(data[8 : 8 + size])
    inner = [k for k in ("rows", "shapes") if k in content.get("__metadata__", {})]
    if inner and draw.random() < 0.5:
        value = replaced(json.loads(content["__metadata__"][inner[0]]), draw)
        content["__metadata__"][inner[0]] = json.dumps(value)
    else:
        content = replaced(content, draw)
    text = json.dumps(content).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def replaced(value: Any, draw: random.Random) -> Any:
    """Return JSON with one value, at any depth, replaced by a hostile one."""
    if isinstance(value, dict | list) and value and draw.random() < 0.9:
        key = draw.choice([*value] if isinstance(value, dict) else range(len(value)))
        if isinstance(value, dict) and draw.random() < 0.05:
            return {k: v for k, v in value.items() if k != key}
        value[key] = replaced(value[key], draw)
        return value
    return draw.choice(HOSTILE)


def replace_file(file: Path, draw: random.Random) -> None:
    """Put a link or a pipe where a file was."""
    file.unlink()
    how = draw.choice(("pipe", "/dev/zero", "victim", "dangling"))
    if how == "pipe":
        os.mkfifo(file)
    elif how == "/dev/zero":
        file.symlink_to(how)
    else:
        outside = next(p / "outside" for p in file.parents if (p / "outside").is_dir())
        file.symlink_to(outside / how)
