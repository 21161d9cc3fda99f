"""A model and its tokenizer, whichever command made them."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from samo.data.tokenizers import Tokenizer, open_tokenizer
from samo.errors import ConfigError, DataError, MaskError
from samo.integrations import model_folders
from samo.integrations.generation import HuggingFaceText
from samo.models.generate import Pieces, Sampling, stream
from samo.models.gpt import GPT
from samo.train.config import TrainConfig
from samo.train.run_dir import RunDir


class RunText:
    """A GPT of ``samo train`` and the tokenizer of its run."""

    def __init__(self, model: GPT, path: Path) -> None:
        self._model: Final = model
        self._tokenizer: Final = tokenizer_of(RunDir.find(path))
        self.context: Final = model.config.context

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text."""
        tokens = torch.from_numpy(self._tokenizer.encode(text).astype(np.int64))
        known = self._model.config.vocab_size
        if len(tokens) and int(tokens.max()) >= known:
            raise DataError(
                f"the text has token {int(tokens.max()):,}, and the model knows {known:,}; leave "
                "out what its training text did not have"
            )
        return tokens

    def stream(
        self,
        tokens: Tensor,
        how: Sampling,
        on_token: Callable[[], None],
        write: Callable[[str], None],
    ) -> None:
        """Continue tokens; pass the text on as it is made. The context slides along."""
        pieces = Pieces(lambda ids: self._tokenizer.decode(np.array(ids)), write)
        for token in stream(self._model, tokens, how, context=self.context):
            on_token()
            pieces.add(token)
        pieces.end()


def tokenizer_of(run: RunDir) -> Tokenizer:
    """Open the tokenizer of a run of ``samo train``."""
    config = run.config()
    assert isinstance(config, TrainConfig)  # that of a GPT
    try:
        return open_tokenizer(str(config.data.tokenizer))
    except DataError as error:
        why = str(error).partition(";")[0]  # the rest is for samo train
        raise DataError(
            f"the tokenizer of '{run.path}' is missing: {why}; put the tokenizer back there"
        ) from None


def open_frozen(
    path: Path,
    weights: Literal["dense", "streamed"],
    device: str,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Open a model that is not trained, in the dtype in which it was saved by default."""
    if weights == "dense":
        model = model_folders.open_model(path, dtype=dtype)
    else:
        try:
            model = model_folders.open_compressed(path, weights="streamed", dtype=dtype)
        except MaskError as error:
            why = str(error).partition(";")[0]  # the rest is for Python
            raise ConfigError(f"--weights streamed needs a pruned model: {why}") from error
    return model.requires_grad_(False).to(device)


TextModel = HuggingFaceText | RunText


def with_tokenizer(model: nn.Module, path: Path) -> TextModel:
    """Return the model of a folder with the tokenizer that belongs to it."""
    if isinstance(model, GPT):
        return RunText(model, path)
    return HuggingFaceText(model, model_folders.tokenizer_folder(path))
