"""Tokenizers: plain bytes, or a Hugging Face tokenizer from a folder."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from samo.errors import DataError, nearest

MAX_VOCAB_SIZE: Final = 2**31
_FILE: Final = "tokenizer.json"


class Tokenizer(Protocol):
    """What samo needs of a tokenizer."""

    name: str  # the argument of `open_tokenizer`
    vocab_size: int  # all tokens are less than this
    fingerprint: str  # equal for equal contents, wherever they were read from

    def encode(self, text: str) -> NDArray[Any]:
        """Return the tokens of a text as a 1-D array of integers."""

    def decode(self, ids: NDArray[Any]) -> str:
        """Return the text of tokens."""


class ByteTokenizer:
    """One token per byte of UTF-8: nothing to train or download, and every file works."""

    name = "bytes"
    vocab_size = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> NDArray[np.uint8]:
        """Return the bytes of a text in UTF-8."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: NDArray[Any]) -> str:
        """Return the text of bytes, with U+FFFD for what is not UTF-8 or not a byte."""
        # A model may have more than 256 tokens; byte 255 never occurs in UTF-8.
        data = np.asarray(ids).clip(0, 255).astype(np.uint8).tobytes()
        return data.decode("utf-8", errors="replace")


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called ``"bytes"``, or the one in a folder with ``tokenizer.json``."""
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    file = Path(name, _FILE)
    if not file.is_file():
        beside = Path(name).parent.glob(f"*/{_FILE}")
        known = [ByteTokenizer.name, *(path.parent.name for path in beside)]
        guess = nearest(Path(name).name, known, likeness=0.7)
        what = f"folder '{name}' has no {_FILE}" if Path(name).is_dir() else f"no folder '{name}'"
        raise DataError(
            f"{what}{guess}; pass --tokenizer bytes, or a folder written by "
            "transformers' tokenizer.save_pretrained(folder)"
        )
    try:
        from tokenizers import Tokenizer as HuggingFace
    except ImportError:
        raise DataError(
            f"the tokenizer in '{name}' needs the package tokenizers: pip install tokenizers"
        ) from None
    with naming(file, "cannot be read"):
        fingerprint = hashlib.sha256(file.read_bytes()).hexdigest()
        return FastTokenizer(name, file, fingerprint, HuggingFace.from_file(str(file)))


@contextmanager
def naming(file: Path, what: str) -> Iterator[None]:
    """Turn any error of the package, also a panic of Rust, into one that names the file."""
    try:
        yield
    except (ImportError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is no Exception, and an Exception nothing narrower
        raise DataError(f"'{file}' {what}: {str(error) or type(error).__name__}") from None


class FastTokenizer:
    """A tokenizer of Hugging Face's ``tokenizers``, without special tokens added."""

    def __init__(self, name: str, path: Path, fingerprint: str, backend: Any) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.path: Final = path
        self.backend: Final = backend
        # Its file may set both, which would cut or pad a training text.
        backend.no_truncation()
        backend.no_padding()
        # The largest id, not the number of ids: some vocabularies have gaps.
        self.vocab_size = max(backend.get_vocab().values()) + 1
        if self.vocab_size >= MAX_VOCAB_SIZE:
            raise ValueError(f"it has the token {self.vocab_size - 1:,}")

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the tokens of a text."""
        with naming(self.path, "cannot encode the text"):
            ids = self.backend.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.uint32)

    def decode(self, ids: NDArray[Any]) -> str:
        """Return the text of tokens."""
        return str(self.backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))
