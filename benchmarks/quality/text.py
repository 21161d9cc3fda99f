"""The text of the GPTs: found, split into what is learnt and what is held back, and put in an order.

Text is bytes, one token each. In a pass, the text is cut into windows that touch but do not
overlap, each pass at another place, and every window is read at most once: so a byte is seen at
most once in a pass.

    pass 1    |----|----|----|----|--       windows of `context` bytes, in an order of the seed's own
    pass 2    -|----|----|----|----|-

Shape suffixes: W = windows, S = steps, B = windows of a step, T = bytes of a window.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from samo.errors import DataError

LEAST_BYTES: Final = 10_000_000
MOST_PASSES: Final = 4
_HELD_BACK: Final = 20  # one file of so many, or so many-th part of each file if there are few
_SUFFIXES: Final = {".md", ".py", ".rst", ".txt"}
_NOT_OURS: Final = {"__pycache__", "dist-packages", "site-packages"}


class Text(NamedTuple):
    """Bytes to learn from, and bytes held back."""

    train: bytes
    valid: bytes
    source: str

    @property
    def digest(self) -> str:
        """Tells texts apart."""
        return hashlib.sha256(self.train + self.valid).hexdigest()[:12]


def find_text(paths: Sequence[Path] = (), *, least: int = LEAST_BYTES) -> Text:
    """Read files, and the text files of folders; without any, the standard library of this Python.

    Of equal files one is taken. Every twentieth file is held back; of fewer than twenty files, the
    last twentieth of each.

    Raises:
        DataError: A path is not there, or there is less text than ``least`` bytes.
    """
    library = Path(os.__file__).parent
    files = list(_files(paths or [library]))
    contents = list(dict.fromkeys(data for data in map(Path.read_bytes, files) if data))
    if len(contents) >= _HELD_BACK:
        parts = (
            b"".join(data for place, data in enumerate(contents) if place % _HELD_BACK),
            b"".join(contents[::_HELD_BACK]),
        )
    else:
        cuts = [len(data) - len(data) // _HELD_BACK for data in contents]
        parts = (
            b"".join(data[:cut] for data, cut in zip(contents, cuts)),
            b"".join(data[cut:] for data, cut in zip(contents, cuts)),
        )
    found = sum(map(len, parts))
    source = ", ".join(path.name for path in paths) or "the standard library of this Python"
    if found < least:
        raise DataError(
            f"{source} has {found:,} bytes of text in {len(contents):,} files, and {least:,} are needed, "
            "lest a model learns them by heart; add files or folders with --text"
        )
    return Text(*parts, source)


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if path.is_dir():
            yield from (
                file
                for file in sorted(path.rglob("*"))
                if file.suffix in _SUFFIXES
                and not _NOT_OURS & set(file.relative_to(path).parts)
                and file.is_file()
            )
        elif path.is_file():
            yield path
        else:
            raise DataError(f"there is no text '{path}'; give files or folders with --text")


def order(num_bytes: int, *, steps: int, batch: int, context: int, seed: int) -> Tensor:
    """Return where the windows of each step start, as (S, B).

    Raises:
        DataError: Some byte would be seen more than four times.
    """
    generator = torch.Generator().manual_seed(seed)
    per_pass = (
        num_bytes - context
    ) // context  # of any phase; a window ends in the next one's start
    passes = -(-steps * batch // max(per_pass, 1))
    if per_pass < 1 or passes > MOST_PASSES:
        raise DataError(
            f"{steps:,} steps of {batch:,} x {context:,} tokens would read a text of {num_bytes:,} bytes "
            f"more than {MOST_PASSES} times; take fewer --steps, or add text with --text"
        )
    starts: list[Tensor] = []
    for _ in range(passes):
        phase = torch.randint(context, (1,), generator=generator)
        starts.append(torch.randperm(per_pass, generator=generator) * context + phase)
    starts_W = torch.cat(starts)[: steps * batch]
    return starts_W.view(steps, batch)


def even(num_bytes: int, *, count: int, context: int) -> Tensor:
    """Return the starts of at most ``count`` windows, spread evenly over a text."""
    starts_W = torch.arange(0, num_bytes - context, context)
    return starts_W[:: -(-len(starts_W) // count)]


def windows(text: Tensor, starts_B: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return tokens and, for each, the next one: both (B, T)."""
    places_BT = starts_B[:, None] + torch.arange(context + 1, device=text.device)
    taken_BT = text[places_BT].long()
    return taken_BT[:, :-1], taken_BT[:, 1:]
