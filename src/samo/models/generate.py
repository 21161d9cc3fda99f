"""Sample text from a model, one token at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from samo.errors import CheckpointError

_MAX_HELD: Final = 8
"""Most tokens held back for a character that is not complete; more are no text."""


class Sampling(NamedTuple):
    """How tokens are drawn.

    At temperature 0 the likeliest one is taken. Otherwise one is drawn from the likeliest ones that
    together have a probability of ``top_p``.
    """

    max_tokens: int
    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0


@torch.no_grad()
def stream(model: nn.Module, prompt_T: Tensor, how: Sampling, *, context: int) -> Iterator[int]:
    """Yield tokens that continue a prompt of at least one token, each as soon as it is drawn.

    The model maps tokens (1, T), at most ``context`` of them, to logits (1, T, V).
    """
    device = next(model.parameters()).device
    tokens_T = prompt_T.to(device)
    random = torch.Generator().manual_seed(how.seed)
    was_training = model.training
    model.eval()
    try:
        for _ in range(how.max_tokens):
            logits_V = model(tokens_T[None, -context:])[0, -1].float().cpu()
            check_logits(logits_V)
            token = _draw(logits_V, how, random)
            tokens_T = torch.cat([tokens_T, token.to(device)])
            yield int(token)
    finally:
        model.train(was_training)


def check_logits(logits: Tensor) -> None:
    """Refuse to draw tokens where a model predicts nothing; -inf is a token that is ruled out."""
    if bool(logits.isnan().any()) or bool(logits.isposinf().any()):
        raise CheckpointError(
            "the model's predictions are NaN or infinite; look for such weights, and for weights "
            "too large for its dtype (bfloat16 has the range of float32)"
        )


def _draw(logits_V: Tensor, how: Sampling, random: torch.Generator) -> Tensor:
    if how.temperature == 0:
        return logits_V.argmax(dim=-1, keepdim=True)
    chances_V = torch.softmax(logits_V / how.temperature, dim=-1)
    if how.top_p < 1:
        sorted_V, order_V = chances_V.sort(descending=True)
        before_V = sorted_V.cumsum(dim=-1) - sorted_V  # 0 for the likeliest, which always stays
        chances_V[order_V[before_V >= how.top_p]] = 0
    return torch.multinomial(chances_V, 1, generator=random)


class Pieces:
    """Turns tokens into text as they come, in whole characters.

    A token may be a part of a character, and its text may depend on the one before: what is new is
    the difference that it makes to the text of the last few.

    Example:
        >>> from samo.models.generate import Pieces
        >>> found = []
        >>> pieces = Pieces(lambda tokens: bytes(tokens).decode(errors="replace"), found.append)
        >>> for token in "1 \N{EURO SIGN}".encode():
        ...     pieces.add(token)
        >>> found
        ['1', ' ', '€']
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None]
    ) -> None:
        self._decode: Final = decode
        self._write: Final = write
        self._before: list[int] = []  # shown last
        self._held: list[int] = []  # not shown yet

    def add(self, token: int) -> None:
        """Write the text of a token, or hold it back until its character is complete."""
        self._held.append(token)
        self._flush(is_end=len(self._held) == _MAX_HELD)

    def end(self) -> None:
        """Write what was held back."""
        self._flush(is_end=True)

    def _flush(self, *, is_end: bool) -> None:
        before = self._decode(self._before) if self._before else ""
        text = self._decode([*self._before, *self._held])[len(before) :]
        if self._held and (is_end or not text.endswith("\N{REPLACEMENT CHARACTER}")):
            self._before, self._held = self._held, []
            if text:
                self._write(text)
