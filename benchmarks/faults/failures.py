"""Does a call to the system that fails cost a checkpoint, or a model that is loaded?

Each failure is a `save`, `async_save`, `copy`, `remove` or `load` in which one call (open, write,
a short write, fsync, replace, mkdir, unlink, rmdir, scandir) fails with one of ten errors, or with
a KeyboardInterrupt. After it, the old checkpoint or the new one must be there whole, nothing may be
left open, the next save must work, and a model whose load failed must be unchanged.
"""

import builtins
import contextlib
import errno
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

import samo
from benchmarks.faults.cases import model_and_optimizer, state_of
from benchmarks.measure import Row, arguments, show, write_rows
from samo import checkpoint
from samo.checkpoint.tensors import SavedTensors
from samo.errors import SamoError

__all__ = ["main"]

CALLS: Final = (
    *("open", "write", "short write", "fsync", "replace", "mkdir", "unlink", "rmdir", "scandir"),
    *("link", "lstat", "builtins.open", "SavedTensors.read"),
)
ERRNOS: Final = (
    *(errno.EIO, errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENOMEM),
    *(errno.EDQUOT, errno.EINTR, errno.ESTALE),
)
ACTIONS: Final = ("save", "async_save", "copy", "remove", "load")
BAD: Final = ("lost", "wrong", "leaked", "left", "unnamed", "changed")
OUTCOMES: Final = ("done", "refused, old", "refused, new", *BAD)
"""A save is refused but new if only the fsync after the rename failed."""


def main() -> None:
    """Inject failures, and show what came of them."""
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=1000, help="failures in all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="samo-failures-") as folder:
        for number in range(20 if options.toy else options.count):
            rows.append(fail(Path(folder), options.seed, number))
    summary = [summarise(rows, action) for action in ACTIONS] + [summarise(rows, "")]
    show(summary, ("action", "failures", *OUTCOMES))
    bad = [row for row in rows if row["outcome"] in BAD]
    for row in bad:
        print(json.dumps(row))
    write_rows(options.out, summary + bad)


def summarise(rows: list[Row], action: str) -> Row:
    of = [row for row in rows if action in ("", row["action"])]
    found = Counter(row["outcome"] for row in of)
    return {"action": action or "all", "failures": len(of)} | {o: found[o] for o in OUTCOMES}


def fail(folder: Path, seed: int, number: int) -> Row:
    """Let one call fail, and look at what is there after it."""
    draw = random.Random(f"{seed} {number}")
    action, kind = draw.choice(ACTIONS), draw.choice(("f32", "bf16", "lean", "dense"))
    counts = count_calls(folder / "counted", action, kind)
    call = draw.choice([call for call, count in counts.items() if count])
    place = draw.randint(1, counts[call])
    code = draw.choice(ERRNOS)
    error: BaseException = OSError(code, os.strerror(code))
    if draw.random() < 0.1:
        error = KeyboardInterrupt()
    elif call == "SavedTensors.read":
        error = MemoryError("out of memory")
    row: Row = {"number": number, "action": action, "call": call, "kind": kind, "place": place}
    row["error"] = repr(error)
    path, other = folder / "last", folder / "other"
    renew(path, kind, 1)
    renew(other, kind, 2)
    model, opt = model_and_optimizer(kind, seed=3)
    before, files = state_of(model, opt), open_files()
    outcome, text = "done", ""
    with breaking({call: place}, error):
        try:
            act(action, path, other, kind, model, opt)
        except (SamoError, KeyboardInterrupt, MemoryError) as caught:
            outcome, text = "refused", str(caught)
        except BaseException as caught:
            outcome, text = "unnamed", f"{type(caught).__name__}: {caught}"
    row["text"] = text[:200]
    now, is_open = seed_in(path, kind), open_files() != files
    if action == "load":
        expected = model_state(kind, 1) if outcome == "done" else before
        outcome = outcome if state_of(model, opt) == expected else "changed"
    is_new = now is None if action == "remove" else now == 2 and action != "load"
    if outcome == "refused":
        outcome = "refused, new" if is_new else "refused, old"
    if now != 1 and not is_new:
        outcome = "lost" if now is None else "wrong"
    if seed_in(other, kind) != 2:
        outcome = "lost"
    outcome = "leaked" if is_open else outcome
    save(path, kind, 4)  # the next save works, and leaves nothing of the failed one
    if seed_in(path, kind) != 4 or len(os.listdir(path)) != 2:
        outcome = "left"
    return row | {"outcome": outcome}


@cache
def count_calls(folder: Path, action: str, kind: str) -> dict[str, int]:
    """Return how many calls an action makes."""
    renew(folder / "last", kind, 1)
    renew(folder / "other", kind, 2)
    model, opt = model_and_optimizer(kind, seed=3)
    with breaking(dict.fromkeys(CALLS, 0), OSError()) as counts:
        act(action, folder / "last", folder / "other", kind, model, opt)
    return dict(counts)


def act(action: str, path: Path, other: Path, kind: str, model: Any, opt: Any) -> None:
    """Do what may fail."""
    if action in ("save", "async_save"):
        save(path, kind, 2, is_async=action == "async_save")
    elif action == "copy":
        checkpoint.copy(other, path)
    elif action == "remove":
        checkpoint.remove(path)
    else:
        samo.load(path, model, opt)


def renew(path: Path, kind: str, seed: int) -> None:
    """Put a checkpoint into a folder, without what was there."""
    good = path.parent / f"{kind}-{seed}"
    if not good.exists():
        save(good, kind, seed)
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(good, path)


def save(path: Path, kind: str, seed: int, *, is_async: bool = False) -> None:
    model, opt = model_and_optimizer(kind, seed=seed)
    if is_async:
        samo.async_save(path, model, opt, extra={"seed": seed}).result()
    else:
        samo.save(path, model, opt, extra={"seed": seed})


def seed_in(path: Path, kind: str) -> int | None:
    """Return which save is in a folder, whole; None if none is there, -1 if parts of several."""
    if not (path / "manifest.json").exists():
        return None
    model, opt = model_and_optimizer(kind, seed=9)
    try:
        seed = samo.load(path, model, opt)["seed"]
    except SamoError:
        return -1
    return seed if state_of(model, opt) == model_state(kind, seed) else -1


@cache
def model_state(kind: str, seed: int) -> str:
    return state_of(*model_and_optimizer(kind, seed=seed))


def open_files() -> list[str]:
    """Return what this process has open."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return sorted(name for name in found if "/proc/" not in name)


@contextlib.contextmanager
def breaking(places: dict[str, int], error: BaseException) -> Any:
    """Count calls, and let those with these numbers fail, once; a number of 0 lets none fail."""
    owners = {"builtins.open": (builtins, "open"), "SavedTensors.read": (SavedTensors, "read")}
    counts = dict.fromkeys(places, 0)

    def counted(call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any, **kwargs: Any) -> Any:
            counts[call] += 1
            if counts[call] != places[call]:
                return real(*args, **kwargs)
            if call == "short write":
                return real(args[0], args[1][: len(args[1]) // 2])
            raise error

        return calling

    with contextlib.ExitStack() as undo:
        for call in places:
            owner, name = owners.get(call, (os, call.removeprefix("short ")))
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, counted(call, getattr(owner, name)))
        yield counts


if __name__ == "__main__":
    main()
