"""Encoded text: encoded in pieces like the whole text, from a cache that is never stale."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from samo.data import files
from samo.data.files import encoded, pieces
from samo.data.tokenizers import open_tokenizer
from samo.errors import DataError
from tests.data.trained_tokenizer import TEXT, save_trained_tokenizer


class Letters:
    """Each character is a token, but spaces; counts its calls and stops at a '!'."""

    name = "letters"

    def __init__(self, vocab_size: int = 2**21, fingerprint: str = "letters 1") -> None:
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint
        self.num_calls = 0

    def encode(self, text: str) -> NDArray[Any]:
        if "!" in text:
            raise KeyboardInterrupt
        self.num_calls += 1
        return np.array([ord(letter) for letter in text if letter != " "], dtype=np.int64)

    def decode(self, ids: NDArray[Any]) -> str:
        return "".join(map(chr, ids))


def write(path: Path, text: str, mtime_ns: int = 10**18) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


@settings(max_examples=40)
@given(st.text(alphabet="ab \n\t\r\u00e9\u20ac\U0001f642"), st.integers(1, 12))
def test_pieces_join_to_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(text.encode())
    found = list(pieces(path, size))
    assert "".join(found) == text
    assert all(len(piece) < 3 * size for piece in found)


def test_pieces_end_with_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "ab\ncd\n  ef\ngh\n\n\nij")
    assert list(pieces(path, 6)) == ["ab\ncd\n  ef\n", "gh\n\n\nij"]
    write(path, "ab\n cd\n ef\n gh\n ij\n")
    assert list(pieces(path, 6)) == ["ab\n cd\n ef\n gh\n", " ij\n"], "before a space if need be"


def test_tokens_of_pieces_are_those_of_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(str(save_trained_tokenizer(tmp_path)))
    path = write(tmp_path / "a.txt", TEXT * 50)
    for size in (150, 333, 1000):
        monkeypatch.setattr(files, "_PIECE", size)
        assert len(list(pieces(path, size))) > 3
        tokens = encoded(path, tokenizer, tmp_path / f"cache-{size}")
        assert np.array_equal(tokens, tokenizer.encode(TEXT * 50))


@pytest.mark.parametrize("before", [0, 9000])  # the decoder reads 8,192 bytes at once
@pytest.mark.parametrize(
    ("content", "offset", "byte"),
    [(b"caf\xe9\n", 3, "e9"), (b"\xff", 0, "ff"), (b"three\xe2\x82", 5, "e2")],
    ids=["latin-1", "first byte", "cut short"],
)
def test_text_that_is_not_utf8_is_refused_with_the_offset(
    tmp_path: Path, content: bytes, offset: int, byte: str, before: int
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xc3\xa9" * before + b"\n" + content)
    place = 2 * before + 1 + offset
    message = rf"data file '.*a.txt' is not UTF-8: byte {place:,} is 0x{byte}; convert it, for exam"
    with pytest.raises(DataError, match=message):
        list(pieces(path, 2**20))


def test_a_text_is_encoded_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path, letters, cache = write(tmp_path / "a.txt", "abc"), Letters(), tmp_path / "cache"
    for _ in range(2):
        assert encoded(path, letters, cache).tolist() == [97, 98, 99]
    assert letters.num_calls == 1
    for vocab_size, dtype in ((2**16, "<u2"), (2**16 + 1, "<u4")):
        tokens = encoded(path, Letters(vocab_size), cache)
        assert (tokens.tolist(), tokens.dtype) == ([97, 98, 99], np.dtype(dtype))
    for damage in (b"", b"z" * 12):
        (found,) = (file for file in cache.iterdir() if file.stat().st_size == 12)
        found.write_bytes(damage)
        assert encoded(path, letters, cache).tolist() == [97, 98, 99]
    write(path, "abcd")
    assert len(encoded(path, letters, cache)) == 4, "another size"
    write(path, "abce", mtime_ns=10**18 + 1)
    assert encoded(path, letters, cache)[-1] == ord("e"), "another time"


def test_tokenizers_and_files_of_one_name_have_caches_of_their_own(tmp_path: Path) -> None:
    one, two = Letters(), Letters(fingerprint="letters 2")
    paths = [write(tmp_path / "a.txt", "one"), write(tmp_path / "two" / "a.txt", "two")]
    for letters in (one, two, one, two):
        for path in paths:
            assert letters.decode(encoded(path, letters, tmp_path / "cache")) == path.read_text()
    assert (one.num_calls, two.num_calls) == (2, 2)


def test_an_interrupted_encoding_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PIECE", 4)
    path, cache = write(tmp_path / "a.txt", "abc\nabc\nabc\nab!\n"), tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        encoded(path, Letters(), cache)
    assert not list(cache.iterdir())


def test_a_text_that_cannot_be_encoded_is_refused(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.txt", "   "), tmp_path / "cache"
    with pytest.raises(DataError, match=r"tokenizer 'letters' finds no tokens in '.*a.txt'"):
        encoded(path, Letters(), cache)
    assert not list(cache.iterdir())
    with pytest.raises(DataError, match="is not text: byte 2 is NUL"):
        encoded(write(path, "ab\0"), Letters(), cache)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write the tokens of '.*a.txt' to .*: File exists"):
        encoded(write(path, "abc"), Letters(), tmp_path / "file")
