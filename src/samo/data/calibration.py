"""Samples of a text for calibration: windows of equal length, without overlap."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from samo.data.batches import Batches
from samo.data.files import check_readable, map_text, pieces
from samo.data.sources import Data
from samo.errors import DataError

_TOKENS_PER_BATCH: Final = 2048
_PIECE: Final = 2**16
"""Characters that are encoded at once. A tokenizer takes some 100 bytes of memory for each."""
_FEW: Final = 8
"""Samples that are better than fewer and longer ones."""
_POOL: Final = 4  # times as many windows are encoded as drawn, if the text has them


def calibration_batches(
    path: Path, encode: Callable[[str], Tensor], samples: int, context: int, seed: int = 0
) -> list[Tensor]:
    """Return ``samples`` windows of ``context`` tokens from a text, as batches (B x T).

    They are drawn at random from the beginning of the text. What ``encode`` puts before a text,
    such as a token that marks its beginning, begins each window.
    """
    check_readable(path)
    map_text(path)  # refuses binary files
    before = encode("")
    length = context - len(before)
    if length < 1:
        raise DataError(f"a context of {context} tokens has no room for text; use a longer one")
    found: list[Tensor] = []
    num_tokens = 0
    for text in pieces(path, _PIECE):
        tokens = encode(text)
        if len(before) and torch.equal(tokens[: len(before)], before):
            tokens = tokens[len(before) :]
        found.append(tokens)
        num_tokens += len(tokens)
        if num_tokens >= _POOL * samples * length:
            break
    if num_tokens < samples * length:
        short = context
        while short > 64 and num_tokens // (short - len(before)) < min(samples, _FEW):
            short //= 2
        most = min(num_tokens // (short - len(before)), samples)
        instead = f", or --samples {most} --context {short}" if most else ""
        raise DataError(
            f"'{path}' has {num_tokens:,} tokens, and {samples:,} samples of {context:,} need "
            f"{samples * length:,}; use more text{instead}"
        )
    windows = torch.cat(found)[: num_tokens // length * length].view(-1, length)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))[:samples]
    chosen = torch.cat([before.expand(samples, -1), windows[order]], dim=1)
    return list(chosen.split(math.ceil(_TOKENS_PER_BATCH / context)))


def example_batches(data: Data, *, samples: int, context: int, seed: int = 0) -> list[Tensor]:
    """Return up to ``samples`` rows of data as a run reads them (1 x T), without padding."""
    batches = Batches(data, context=context, batch_size=1, seed=seed)
    rows = (next(batches) for _ in range(min(samples, batches.num_windows)))
    return [row.inputs_BT[:, : row.num_read] for row in rows]
