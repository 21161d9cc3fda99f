"""Tokenizers: plain bytes, or a Hugging Face tokenizer from a folder."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from samo.errors import DataError, nearest

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFace

__all__ = ["ByteTokenizer", "Tokenizer", "open_tokenizer"]

_WHOLE: Final = "tokenizer.json"
_PARTS: Final = ("vocab.json", "merges.txt")


class Tokenizer(Protocol):
    """What samo needs of a tokenizer."""

    name: str
    """The name that `open_tokenizer` takes."""
    vocab_size: int
    """Tokens are less than this."""
    fingerprint: str
    """Equal for tokenizers with the same contents, wherever they were read from."""

    def encode(self, text: str) -> NDArray[Any]:
        """Return the tokens of a text as a 1-D array of integers."""

    def decode(self, ids: NDArray[Any]) -> str:
        """Return the text of tokens."""


class ByteTokenizer:
    """One token for each byte of UTF-8: nothing to train or to download, and any file fits.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("Hi!")
        array([ 72, 105,  33], dtype=uint8)
        >>> tokenizer.decode(np.array([72, 105, 33]))
        'Hi!'
    """

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


def open_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """Return the byte tokenizer, or the Hugging Face tokenizer of a folder.

    Example:
        >>> open_tokenizer("bytes").vocab_size
        256

    Args:
        name: ``"bytes"``, or a folder with ``tokenizer.json`` or with GPT-2's ``vocab.json`` and
            ``merges.txt`` (byte-level BPE).

    Raises:
        DataError: The folder is missing or has no valid tokenizer, or the package ``tokenizers``
            is not installed.
    """
    name = os.fspath(name)
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    folder = Path(name)
    if not folder.is_dir():
        beside = [folder.parent / entry for entry in _names(folder.parent)]
        known = [ByteTokenizer.name, *(str(path) for path in beside if path.is_dir())]
        what = (
            "is a file" if folder.exists() else "is not a local folder, and nothing is downloaded"
        )
        raise DataError(
            f"tokenizer '{name}' {what}{nearest(name, known)}; give the word 'bytes' or a folder "
            f"with {_WHOLE}"
        )
    choices = [[folder / _WHOLE], [folder / part for part in _PARTS]]
    files = next((files for files in choices if all(file.is_file() for file in files)), None)
    if files is None:
        found = _names(folder)
        listed = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
        raise DataError(
            f"folder '{name}' has no tokenizer: looked for {_WHOLE}, then for {_PARTS[0]} and "
            f"{_PARTS[1]}, and found {listed or 'nothing'}; save one there with "
            "transformers' tokenizer.save_pretrained(folder)"
        )
    try:
        return _FolderTokenizer(name, files)
    except ImportError:
        raise DataError(
            f"reading the tokenizer in '{name}' needs a package that is not installed; "
            "pip install tokenizers"
        ) from None
    except Exception as error:  # the package raises nothing narrower
        raise DataError(
            f"the tokenizer in '{name}' cannot be read: {error}; take another copy of "
            f"{' and '.join(file.name for file in files)}"
        ) from None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


class _FolderTokenizer:
    """A tokenizer of Hugging Face's ``tokenizers``, without special tokens added."""

    def __init__(self, name: str, files: list[Path]) -> None:
        self.name = name
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
        self.fingerprint = digest.hexdigest()
        self._tokenizer: Final = _read(files)
        # The largest id, not the number of ids: some vocabularies have gaps.
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1

    def encode(self, text: str) -> NDArray[np.uint32]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.uint32)

    def decode(self, ids: NDArray[Any]) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def _read(files: list[Path]) -> "HuggingFace":
    from tokenizers import Tokenizer as HuggingFace, decoders, models, pre_tokenizers

    if len(files) == 1:
        tokenizer = HuggingFace.from_file(str(files[0]))
        # The file may set both, which would cut or pad a training text.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    tokenizer = HuggingFace(models.BPE.from_file(*map(str, files)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
