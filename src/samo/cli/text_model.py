"""A model and its tokenizer, whichever command made them."""

from pathlib import Path

from torch import nn

from samo.integrations.generation import HuggingFaceText
from samo.integrations.model_folders import tokenizer_folder
from samo.models.gpt import GPT
from samo.train.run_text import RunText

__all__ = []

TextModel = HuggingFaceText | RunText


def with_tokenizer(model: nn.Module, path: Path) -> TextModel:
    """Return the model of a folder with the tokenizer that belongs to it."""
    if isinstance(model, GPT):
        return RunText(model, path)
    return HuggingFaceText(model, tokenizer_folder(path))
