"""A sum of losses over tokens, with the logits of a chunk of tokens at a time.

With a large vocabulary, all logits and their gradients would take more memory than the whole state
of a pruned model.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MAX_LOGITS: Final = 2**27  # that exist at once in a loss: 2 GB with their gradients


def sum_in_chunks(
    loss_sum: Callable[..., Tensor],
    *rows: Tensor,
    vocab_size: int,
    max_logits: int | None = None,
) -> Tensor:
    """Return ``loss_sum(*rows)``, the sum of the losses of N tokens.

    Above ``max_logits`` it is called with chunks of the rows, and again in backward, so that
    nothing of the size of the logits is kept in between.
    """
    size = 1 << max((max_logits or MAX_LOGITS) // vocab_size, 1).bit_length() - 1
    if len(rows[0]) <= size:
        return loss_sum(*rows)
    parts = zip(*(tensor.split(size) for tensor in rows))
    return torch.stack([checkpoint(loss_sum, *part, use_reentrant=False) for part in parts]).sum()
