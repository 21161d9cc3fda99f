"""Encode text files once, into a cache that is memory-mapped from then on.

    cache/name-1f3a5c7e9b2d.tokens    the tokens, uint16 or uint32, little endian
    cache/name-1f3a5c7e9b2d.json      source, tokenizer, dtype and count; a mismatch encodes again

The text is read in pieces that end with a line, so memory does not grow with the file.
"""

import hashlib
import io
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samo.data.files import map_text
from samo.data.tokenizers import Tokenizer
from samo.errors import DataError
from samo.utils import atomic_io

__all__ = []

_PIECE: Final = 2**20
"""Characters that are encoded at once, or up to twice as many."""
_VERSION: Final = 2

_log: Final = logging.getLogger(__name__)


def encoded(path: Path, tokenizer: Tokenizer, cache: Path) -> NDArray[Any]:
    """Map the tokens of a text file, which are encoded if the cache does not have them.

    Raises:
        DataError: The text is binary or not UTF-8, has no tokens, or the cache cannot be written.
    """
    map_text(path)  # refuses binary files
    source = path.resolve()
    stat = source.stat()
    digest = hashlib.sha256(f"{source}\0{tokenizer.fingerprint}".encode()).hexdigest()
    target = cache / f"{path.name}-{digest[:12]}.tokens"
    facts: dict[str, Any] = {
        "version": _VERSION,
        "source": str(source),
        "size_bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "tokenizer": tokenizer.fingerprint,
        "dtype": "<u2" if tokenizer.vocab_size <= 2**16 else "<u4",
    }
    if not _is_current(target, facts):
        _log.info("encoding '%s' with tokenizer '%s' into '%s'", path, tokenizer.name, target)
        try:
            _encode(path, tokenizer, target, facts)
        except OSError as error:
            raise DataError(
                f"data file '{path}' cannot be encoded into '{target}': {error.strerror}; "
                "name another cache folder or free some space"
            ) from None
    return np.asarray(np.memmap(target, dtype=facts["dtype"], mode="r"))


def _is_current(target: Path, facts: dict[str, Any]) -> bool:
    """Return whether the cache has all tokens of the same text and tokenizer."""
    try:
        record = json.loads(target.with_suffix(".json").read_text(encoding="utf-8"))
        num_tokens, left = divmod(target.stat().st_size, np.dtype(facts["dtype"]).itemsize)
    except (OSError, ValueError):  # missing, or not JSON
        return False
    return not left and bool(record == {**facts, "num_tokens": num_tokens})


def _encode(path: Path, tokenizer: Tokenizer, target: Path, facts: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    record = target.with_suffix(".json")
    record.unlink(missing_ok=True)  # it describes the file that is about to be replaced
    num_tokens = 0

    def chunks() -> Iterator[bytes]:
        nonlocal num_tokens
        for text in pieces(path):
            tokens = tokenizer.encode(text)
            num_tokens += len(tokens)
            yield tokens.astype(facts["dtype"]).tobytes()

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
        atomic_io.write_new(f"{folder}/tokens", chunks())
        if not num_tokens:
            raise DataError(
                f"data file '{path}' is empty: tokenizer '{tokenizer.name}' makes no tokens of it"
            )
        os.replace(f"{folder}/tokens", target)
    atomic_io.write_bytes(record, json.dumps({**facts, "num_tokens": num_tokens}).encode())


def pieces(path: Path) -> Iterator[str]:
    """Yield a text in pieces of 1 to 2 million characters, each up to the end of a line."""
    lines: list[str] = []
    size = 0
    with path.open("rb") as raw, io.TextIOWrapper(raw, "utf-8", newline="\n") as file:
        try:
            while line := file.readline(_PIECE):
                # Tokenizers merge spaces and line ends with the text that follows them: a cut in
                # front of a line that begins with text changes no token.
                if size >= 2 * _PIECE or (size >= _PIECE and not line[0].isspace()):
                    yield "".join(lines)
                    lines, size = [], 0
                lines.append(line)
                size += len(line)
        except UnicodeDecodeError as error:
            # The decoder saw all bytes up to the position of the binary file below.
            start = raw.tell() - len(error.object) + error.start
            raise DataError(
                f"data file '{path}' is not UTF-8: byte {start:,} is "
                f"0x{error.object[error.start]:02x} ({error.reason}); convert it (iconv -t utf-8), "
                "or train on its bytes with the tokenizer 'bytes'"
            ) from None
    if lines:
        yield "".join(lines)
