"""A model and its tokenizer, whichever command made them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from samo.integrations.generation import HuggingFaceText
from samo.integrations.model_folders import tokenizer_folder
from samo.models.generate import Sampling
from samo.models.gpt import GPT
from samo.train.run_text import RunText

__all__ = []


class TextModel(Protocol):
    """A model with its tokenizer."""

    @property
    def context(self) -> int | None:
        """Most tokens that it can read; None if there is no limit."""

    @property
    def has_chat(self) -> bool:
        """Whether it knows conversations."""

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text."""

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> Tensor:
        """Return the tokens of a conversation up to the answer that is due."""

    def stream(
        self,
        tokens: Tensor,
        how: Sampling,
        on_token: Callable[[], None],
        write: Callable[[str], None],
    ) -> None:
        """Continue tokens; pass the text on as it is made."""


def with_tokenizer(model: nn.Module, path: Path) -> TextModel:
    """Return the model of a folder with the tokenizer that belongs to it."""
    if isinstance(model, GPT):
        return RunText(model, path)
    return HuggingFaceText(model, tokenizer_folder(path))
