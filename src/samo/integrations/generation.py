"""Text from causal language models of transformers: completion and chat, streamed."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from samo.errors import CheckpointError, DataError, first_words
from samo.integrations.causal_lm import context_of, padding_of
from samo.integrations.tokenizers import open_tokenizer
from samo.models.generate import Pieces, Sampling, check_logits

__all__ = []


class HuggingFaceText:
    """A model of transformers and the tokenizer of its folder."""

    def __init__(self, model: Any, folder: Path) -> None:
        self._model: Final = model
        self._model.eval()
        self._tokenizer: Final = open_tokenizer(folder)
        self._folder: Final = folder
        self.context: Final = context_of(self._model.config)

    @property
    def has_chat(self) -> bool:
        """Whether the folder says how to write a conversation."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text, with those that the tokenizer puts before it."""
        try:
            found = self._tokenizer(text, return_tensors="pt", verbose=False)
        except Exception as error:  # of the package tokenizers, which has nothing narrower
            raise DataError(
                f"the tokenizer of '{self._folder}' cannot encode the text: {first_words(error)}; "
                "copy the tokenizer's files from the model's source"
            ) from error
        return self._checked(found["input_ids"])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> Tensor:
        """Return the tokens of a conversation up to the answer that is due."""
        try:
            found = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # of the folder's Jinja template, in transformers' sandbox
            raise DataError(
                f"the chat template of '{self._folder}' cannot write this conversation: "
                f"{first_words(error)}; use --prompt"
            ) from error
        return self._checked(found["input_ids"])

    def _checked(self, ids: Tensor) -> Tensor:
        tokens = ids[0].long()  # an empty text gives floats
        known = self._model.get_input_embeddings().num_embeddings
        if len(tokens) and int(tokens.max()) >= known:
            raise DataError(
                f"the tokenizer of '{self._folder}' gives token {int(tokens.max()):,}, and the "
                f"model knows {known:,} tokens; the tokenizer is not that of the model"
            )
        return tokens

    def stream(
        self,
        tokens: Tensor,
        how: Sampling,
        on_token: Callable[[], None],
        write: Callable[[str], None],
    ) -> None:
        """Continue tokens until the model ends; pass the text on as it is made.

        Settings that ``how`` does not have are those of the folder's generation_config.json.
        """
        settings = copy.deepcopy(self._model.generation_config)
        settings.num_beams = settings.num_return_sequences = 1
        left = how.max_tokens if self.context is None else self.context - len(tokens)
        settings.max_length, settings.max_new_tokens = None, min(how.max_tokens, left)
        settings.do_sample = how.temperature > 0
        settings.temperature, settings.top_p = how.temperature, how.top_p
        if not settings.do_sample:
            settings.temperature = settings.top_p = settings.top_k = None
        settings.pad_token_id = padding_of(settings)
        torch.manual_seed(how.seed)
        inputs = tokens[None].to(self._model.device)
        try:
            self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=settings,
                logits_processor=[_checked_logits],
                streamer=_streamer(self._tokenizer, on_token, write),
            )
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # by its settings
            if isinstance(error, RuntimeError) and "overflow" not in str(error):
                raise  # memory may have run out
            raise CheckpointError(
                f"'{self._folder}' cannot generate text: {first_words(error)}; see its "
                "generation_config.json"
            ) from error


def _checked_logits(_: Tensor, logits: Tensor) -> Tensor:
    check_logits(logits)
    return logits


def _streamer(tokenizer: Any, on_token: Callable[[], None], write: Callable[[str], None]) -> Any:
    from transformers.generation.streamers import BaseStreamer

    pieces = Pieces(lambda ids: tokenizer.decode(ids, skip_special_tokens=True), write)

    class Streamer(BaseStreamer):  # type: ignore[misc]
        """Passes on characters as they are complete; transformers' own waits for whole words."""

        is_prompt = True

        def put(self, value: Any) -> None:
            if not self.is_prompt:
                on_token()
                pieces.add(int(value))
            self.is_prompt = False

        def end(self) -> None:
            pieces.end()

    return Streamer()
