"""Encode text files once: the tokens go into a cache of ``.npy`` files and are mapped from there.

    cache/name-1f3a5c7e9b2d.npy    the tokens, uint16 or uint32
    cache/name-1f3a5c7e9b2d.json   what they were made from; if that has changed, they are made again

The text passes through in pieces that end with a line, so memory does not grow with the file.
"""

import codecs
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from samo.data.files import map_text, map_token_file
from samo.data.tokenizers import Tokenizer
from samo.errors import DataError

__all__ = []

_PIECE_BYTES: Final = 2**20
_VERSION: Final = 1

_log: Final = logging.getLogger(__name__)


def encoded(path: Path, tokenizer: Tokenizer, cache: Path) -> NDArray[Any]:
    """Map the tokens of a text file, from the cache if they are there.

    Raises:
        DataError: The text is binary or not UTF-8, has no tokens, or the cache cannot be written.
    """
    map_text(path)  # refuses binary files
    source = path.resolve()
    stat = source.stat()
    digest = hashlib.sha256(f"{source}\0{tokenizer.fingerprint}".encode()).hexdigest()
    target = cache / f"{path.name}-{digest[:12]}.npy"
    facts = {
        "version": _VERSION,
        "source": str(source),
        "size_bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "tokenizer": tokenizer.fingerprint,
    }
    if (tokens := _stored(target, facts)) is None:
        try:
            _encode(path, tokenizer, target, facts)
        except OSError as error:
            raise DataError(
                f"data file '{path}' cannot be encoded into '{target}': {error.strerror}; "
                "name another cache folder or make room in this one"
            ) from None
        tokens = map_token_file(target)
    return tokens


def _stored(target: Path, facts: dict[str, Any]) -> NDArray[Any] | None:
    """Map what an earlier call wrote, if it was made from the same text and tokenizer, and is whole."""
    try:
        stored = json.loads(target.with_suffix(".json").read_text(encoding="utf-8"))
        tokens = map_token_file(target)
    except (OSError, ValueError):  # not there, not JSON, or (DataError) not a whole .npy
        return None
    return tokens if stored == {**facts, "num_tokens": len(tokens)} else None


def _encode(path: Path, tokenizer: Tokenizer, target: Path, facts: dict[str, Any]) -> None:
    _log.info("encoding '%s' with tokenizer '%s' into '%s'", path, tokenizer.name, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    record = target.with_suffix(".json")
    record.unlink(missing_ok=True)  # it describes the file that is about to be replaced
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        num_tokens = _write_tokens(aside, path, tokenizer)
        os.replace(aside, target)
        aside.write_text(json.dumps({**facts, "num_tokens": num_tokens}), encoding="utf-8")
        os.replace(aside, record)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _write_tokens(aside: Path, path: Path, tokenizer: Tokenizer) -> int:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    num_tokens = 0
    with aside.open("wb") as file:
        _write_header(file, dtype, 0)
        start = file.tell()
        for text in pieces(path):
            tokens = tokenizer.encode(text)
            file.write(tokens.astype(dtype).tobytes())
            num_tokens += len(tokens)
        if not num_tokens:
            raise DataError(
                f"data file '{path}' is empty: tokenizer '{tokenizer.name}' makes no tokens of it"
            )
        file.seek(0)
        _write_header(file, dtype, num_tokens)
        assert file.tell() == start, "numpy leaves room in the header for the number to grow"
        file.flush()
        os.fsync(file.fileno())
    return num_tokens


def _write_header(file: Any, dtype: np.dtype[Any], num_tokens: int) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)}
    npy.write_array_header_1_0(file, header)


def pieces(path: Path) -> Iterator[str]:
    """Yield a text in pieces of about 1 MB, each up to the end of a line.

    Raises:
        DataError: The text is not UTF-8.
    """
    with path.open("rb") as file:
        start, data = 0, b""
        while (block := file.read(_PIECE_BYTES)) or data:
            data += block
            end = _last_line_end(data) if block else len(data)
            try:
                # With `final` false, a character that is cut in half waits for the next piece.
                text, used = codecs.utf_8_decode(data[:end], "strict", not block)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"data file '{path}' is not UTF-8: byte {start + error.start:,} is "
                    f"0x{data[error.start]:02x} ({error.reason}); convert it (iconv -t utf-8), or "
                    "train on its bytes with the tokenizer 'bytes'"
                ) from None
            yield text
            start, data = start + used, data[used:]


def _last_line_end(data: bytes) -> int:
    """Return where the last line ends, or all there is if no line does.

    Best is a line with no space after it: tokenizers take spaces, line ends too, together with what
    comes after them, and there a cut changes no token.
    """
    ends = [match.end() for match in re.finditer(rb"\n(?=\S)", data)]
    return ends[-1] if ends else data.rfind(b"\n") + 1 or len(data)
