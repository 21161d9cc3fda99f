"""The tokenizer of a Hugging Face model: documents, completions and conversations as it reads them.

    {"text": ...}                     BOS  text                 EOS
    {"prompt": ..., "completion": .}  BOS  prompt | completion  EOS
    {"messages": ...}                 what the chat template of the folder writes

BOS is added if the tokenizer adds it, EOS always, unless the text has it already; a chat template
writes its own. Right of the bar, and of a conversation what the assistant says, is learned.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samo.data.rows import Chat, Completion, Example, Text
from samo.data.tokenizers import FastTokenizer, naming
from samo.errors import DataError, first_words
from samo.integrations.folder_files import TOKENIZER_FILES, check_entries

__all__ = ["ModelTokenizer"]

_TAGS: Final = "{% generation %} and {% endgeneration %}"
_UNREADABLE: Final = "has a tokenizer that cannot be read"
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")


def open_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder as transformers reads it. No code from the folder runs."""
    if not folder.is_dir():
        raise DataError(f"'{folder}' is not a folder; name a Hugging Face model folder")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DataError(
            f"the tokenizer in '{folder}' needs a package that is not installed: pip install "
            "transformers"
        ) from None
    check_entries(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(
            f"folder '{folder}' has no tokenizer; copy the tokenizer files of the model into "
            "it, or write them with transformers' tokenizer.save_pretrained(folder)"
        )
    with naming(folder, _UNREADABLE):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


class ModelTokenizer(FastTokenizer):
    """The tokenizer in a model folder, read by transformers. No code from the folder runs.

    Example:
        >>> from samo.integrations.model_tokenizer import ModelTokenizer
        >>> ModelTokenizer("no-such-folder")
        Traceback (most recent call last):
        ...
        samo.errors.DataError: 'no-such-folder' is not a folder; name a Hugging Face model folder

    Args:
        folder: A folder with ``tokenizer.json`` or the files of an older tokenizer.

    Raises:
        DataError: There is no tokenizer in the folder, or it cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder)
        self._tokenizer: Final[Any] = open_tokenizer(path)
        with naming(path, _UNREADABLE):
            found = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
            contents = [
                (file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in found
            ]
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise ValueError("it has no tokenizer.json, and transformers cannot make one")
            fingerprint = hashlib.sha256(repr(contents).encode()).hexdigest()
            super().__init__(str(folder), path, fingerprint, backend)
            bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
            self._bos: Final = [bos] if bos in self._tokenizer("").input_ids else []
            self._eos: Final = [] if eos is None else [eos]

    def encode_examples(
        self, examples: Sequence[tuple[str, Example]]
    ) -> Iterator[NDArray[np.int32]]:
        """Yield the tokens of examples, complemented where they are only read."""
        plans = [self._plan(place, example) for place, example in examples]
        # All at once, because a batch is encoded on all cores.
        encoded = iter(self._encode([text for texts, _ in plans for text in texts]))
        for texts, finish in plans:
            yield finish(*(next(encoded) for _ in texts))

    def _plan(
        self, place: str, example: Example
    ) -> tuple[list[str], Callable[..., NDArray[np.int32]]]:
        """Return the texts of an example, and what makes its tokens of their encodings."""
        if isinstance(example, Text):
            return [example.text], lambda text: self._marked([], text.ids)
        if isinstance(example, Completion):
            whole = example.prompt + example.completion
            return [example.prompt, whole], partial(self._completed, example)
        if self._is_tagged(place, example):
            return [], partial(self._tagged, place, example)
        text, turns = self._render(place, example)
        return [text], partial(_learning, turns)

    def _completed(self, example: Completion, prompt: Any, whole: Any) -> NDArray[np.int32]:
        rest = whole.ids[len(prompt.ids) :]
        if whole.ids[: len(prompt.ids)] != prompt.ids:
            # A token spans the border. A prompt is always encoded as it is when the model is used,
            # without what follows.
            rest = self._encode([example.completion])[0].ids
        return self._marked(prompt.ids, rest)

    def _encode(self, texts: list[str]) -> Sequence[Any]:
        with naming(self.path, "has a tokenizer that cannot encode the text"):
            encoded: Sequence[Any] = self.backend.encode_batch(texts, add_special_tokens=False)
        return encoded

    def _marked(self, read: list[int], learned: list[int]) -> NDArray[np.int32]:
        """Return tokens with BOS and EOS, complemented where they are only read."""
        bos, eos = self._bos, self._eos
        if (read or learned)[:1] == bos:
            bos = []
        if learned[-1:] == eos:
            eos = []
        # A prompt may be empty; BOS is only read, like the first token of anything.
        read = [*bos, *read]
        return np.array([*(~token for token in read), *learned, *eos], dtype=np.int32)

    # Conversations

    def _is_tagged(self, place: str, chat: Chat) -> bool:
        """Return whether the chat template marks what the assistant says."""
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"{place}: 'messages' need a chat template, and folder '{self.name}' has none; put "
                "the chat_template.jinja of a model into it, or write 'prompt' and 'completion'"
            )
        template = self._tokenizer.get_chat_template(tools=chat.tools)
        return _GENERATION.search(template) is not None

    def _tagged(self, place: str, chat: Chat) -> NDArray[np.int32]:
        """Return the tokens of a conversation, complemented unless the template marks them."""
        options = ("tokenize", "return_dict", "return_assistant_tokens_mask")
        encoded = self._apply(place, chat, **dict.fromkeys(options, True))
        tokens = np.array(encoded["input_ids"], dtype=np.int32)
        return np.where(np.array(encoded["assistant_masks"], dtype=bool), tokens, ~tokens)

    def _render(self, place: str, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and where in it the assistant speaks, backwards."""
        whole = self._apply(place, chat)
        turns: list[tuple[int, int]] = []
        for number, message in reversed([*enumerate(chat.messages)]):
            if message["role"] != "assistant":
                continue
            limit = turns[-1][0] if turns else len(whole)
            until = self._apply(place, chat, number + 1)
            if not number:
                raise DataError(
                    f"{place}: message 1 is of the assistant, and the chat template of "
                    f"'{self.name}' does not show where it starts; mark it with {_TAGS}, or let "
                    "the conversation start with the user"
                )
            head = self._apply(place, chat, number, add_generation_prompt=True)
            turn = _turn(whole[:limit], head, until, self._tokenizer.eos_token)
            if turn is None:
                raise DataError(
                    f"{place}: the chat template of '{self.name}' rewrites the start of a "
                    f"conversation once message {number + 1} follows, so what the assistant says "
                    f"is not known; mark it in the template with {_TAGS}, or split the "
                    "conversation"
                )
            turns.append(turn)
        return whole, turns

    def _apply(self, place: str, chat: Chat, stop: int | None = None, **options: bool) -> Any:
        """Return what the template makes of a conversation, or of its messages up to ``stop``."""
        # A template is a stranger's program. transformers runs it in jinja's
        # ImmutableSandboxedEnvironment, which gives it no way to Python's objects or to files.
        try:
            return self._tokenizer.apply_chat_template(
                chat.messages[:stop], tools=chat.tools, **{"tokenize": False, **options}
            )
        except ImportError as error:
            raise DataError(f"a chat template needs jinja2: {first_words(error)}") from None
        except Exception as error:  # a template can raise anything
            raise DataError(
                f"{place}: the chat template of '{self.name}' refuses the conversation: "
                f"{first_words(error)}"
            ) from None


def _turn(whole: str, head: str, until: str, eos: str | None) -> tuple[int, int] | None:
    """Return where a turn of the assistant stands in a conversation, or None if it is not clear.

    Args:
        whole: The conversation, up to the next turn of the assistant.
        head: What a model reads before it speaks.
        until: The conversation up to this turn, as if it were the last.
        eos: With what a model ends its turn; what the template adds after it is not learned.
    """
    start, stop = len(head), len(whole)
    if not whole.startswith(head):
        return None
    find = str.find
    if whole.startswith(until):
        stop, find = len(until), str.rfind
    end = find(whole[start:stop], eos) if eos else -1
    if end >= 0:
        assert eos is not None
        return start, start + end + len(eos)
    # Some templates rewrite a turn once others follow; then only EOS shows its end.
    return (start, stop) if whole.startswith(until) else None


def _learning(turns: list[tuple[int, int]], encoding: Any) -> NDArray[np.int32]:
    """Return tokens, complemented unless they overlap a turn."""
    tokens = np.array(encoding.ids, dtype=np.int32)
    starts, stops = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    is_learned = np.zeros(len(tokens), dtype=bool)
    for start, stop in turns:
        is_learned |= (stops > start) & (starts < stop)
    return np.where(is_learned, tokens, ~tokens)
