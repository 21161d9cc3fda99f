"""The tokenizer of a Hugging Face model: documents, completions and conversations as it reads them.

    {"text": ...}                     BOS  text                 EOS
    {"prompt": ..., "completion": .}  BOS  prompt | completion  EOS
    {"messages": ...}                 what the chat template of the folder writes

BOS is added if the tokenizer adds it, EOS always, unless the text has it already; a chat template
writes its own. Right of the bar, and of a conversation what the assistant says, is learned.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samo.data.rows import Completion, Example, Text
from samo.data.tokenizers import FastTokenizer, naming
from samo.errors import DataError
from samo.integrations.assistant_mask import ChatTemplate, learned_tokens
from samo.integrations.folder_files import TOKENIZER_FILES, check_entries

_UNREADABLE: Final = "has a tokenizer that cannot be read"


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
            self._template: Final = ChatTemplate(str(folder), self._tokenizer)
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
        if self._template.is_tagged(place, example):
            return [], partial(self._template.tagged, place, example)
        text, turns = self._template.render(place, example)
        return [text], partial(learned_tokens, turns)

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
