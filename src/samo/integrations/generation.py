"""Text from causal language models of transformers: completion and chat, streamed."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from samo.errors import DataError, first_words
from samo.integrations.causal_lm import context_of, sample
from samo.integrations.model_tokenizer import open_tokenizer
from samo.models.generate import Pieces, Sampling


class HuggingFaceText:
    """A model of transformers and the tokenizer of its folder."""

    def __init__(self, model: Any, folder: Path) -> None:
        self._model: Final = model
        self._tokenizer: Final = open_tokenizer(folder)
        self._folder: Final = folder
        self.context: Final = context_of(self._model.config)

    @property
    def has_chat(self) -> bool:
        """Whether the folder says how to write a conversation."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text, with those that the tokenizer puts before it."""
        try:
            found = self._tokenizer(text, return_tensors="pt", verbose=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the package tokenizers has nothing narrower for a panic
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
        """Continue tokens until the model ends; pass the text on as it is made."""
        if self.context is not None:
            how = how._replace(max_tokens=min(how.max_tokens, self.context - len(tokens)))
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        streamer = _Streamer(Pieces(decode, write), on_token)
        sample(self._model, tokens, how, streamer=streamer, tokenizer=self._tokenizer)


class _Streamer:
    """Passes on characters as they are complete; that of transformers waits for whole words."""

    def __init__(self, pieces: Pieces, on_token: Callable[[], None]) -> None:
        self._pieces: Final = pieces
        self._on_token: Final = on_token

    def put(self, tokens: Tensor) -> None:
        """Take a token, but not the prompt, which has two dimensions."""
        if tokens.dim() == 1:
            self._on_token()
            self._pieces.add(int(tokens))

    def end(self) -> None:
        """Write what was held back."""
        self._pieces.end()
