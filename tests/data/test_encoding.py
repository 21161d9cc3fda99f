"""Encoded text: the tokens of the whole text, encoded in pieces, from a cache that is never stale."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from samo.data import encoding
from samo.data.encoding import encoded, pieces
from samo.data.tokenizers import open_tokenizer
from samo.errors import DataError
from tests.data.trained_tokenizer import TEXT, save_trained_tokenizer


class Letters:
    """Each character is its own token, spaces are none; counts its calls and stops at a '!'."""

    name = "letters"
    fingerprint = "letters 1"

    def __init__(self, vocab_size: int = 2**21) -> None:
        self.vocab_size = vocab_size
        self.num_calls = 0

    def encode(self, text: str) -> NDArray[Any]:
        if "!" in text:
            raise KeyboardInterrupt
        self.num_calls += 1
        return np.array([ord(letter) for letter in text if letter != " "], dtype=np.int64)

    def decode(self, ids: NDArray[Any]) -> str:
        return "".join(map(chr, ids))


def write(path: Path, text: str, mtime_ns: int = 10**18) -> Path:
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


# Pieces


@settings(max_examples=60)
@given(st.text(alphabet="ab \n\t\r\u00e9\u20ac\U0001f642"), st.integers(1, 12))
def test_pieces_join_to_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_PIECE", size)
        found = list(pieces(path))
    assert "".join(found) == text
    assert all(len(piece) < 3 * size for piece in found)


def test_pieces_end_with_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_PIECE", 6)
    path = write(tmp_path / "a.txt", "ab\ncd\n  ef\ngh\n\n\nij")
    assert list(pieces(path)) == ["ab\ncd\n  ef\n", "gh\n\n\nij"]
    write(path, "ab\n cd\n ef\n gh\n ij\n")
    assert list(pieces(path)) == ["ab\n cd\n ef\n gh\n", " ij\n"], "before a space if need be"


def test_tokens_of_pieces_are_those_of_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(save_trained_tokenizer(tmp_path))
    path = write(tmp_path / "a.txt", TEXT * 50)
    for size in (150, 333, 1000):
        monkeypatch.setattr(encoding, "_PIECE", size)
        assert len(list(pieces(path))) > 3
        assert np.array_equal(
            encoded(path, tokenizer, tmp_path / f"cache-{size}"), tokenizer.encode(TEXT * 50)
        )


@pytest.mark.parametrize("before", [0, 5, 9000])  # the decoder reads 8,192 bytes at once
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
    message = rf"data file '.*a.txt' is not UTF-8: byte {place:,} is 0x{byte} \(.*iconv"
    with pytest.raises(DataError, match=message):
        list(pieces(path))


# The cache


def test_tokens_are_mapped_from_a_file_as_narrow_as_the_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abc")
    for vocab_size, dtype in [(2**16, np.uint16), (2**16 + 1, np.uint32)]:
        cache = tmp_path / f"{vocab_size}" / "deep"
        tokens = encoded(path, Letters(vocab_size), cache)
        assert tokens.tolist() == [97, 98, 99]
        assert tokens.dtype == dtype
        assert isinstance(tokens.base, np.memmap)
        record, name = sorted(file.name for file in cache.iterdir())
        assert re.fullmatch(r"a\.txt-[0-9a-f]{12}\.json", record)
        assert name == record.replace(".json", ".tokens")


def test_a_file_is_encoded_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    path, letters, cache = write(tmp_path / "a.txt", "abc"), Letters(), tmp_path / "cache"
    for _ in range(2):
        assert encoded(path, letters, cache).tolist() == [97, 98, 99]
    assert letters.num_calls == 1
    write(path, "abcd")
    assert len(encoded(path, letters, cache)) == 4, "another size"
    write(path, "abce", mtime_ns=10**18 + 1)
    assert encoded(path, letters, cache)[-1] == ord("e"), "another time"


def test_tokenizers_and_files_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    one, two = Letters(), Letters()
    two.fingerprint = "letters 2"
    (tmp_path / "two").mkdir()
    paths = [write(tmp_path / "a.txt", "one"), write(tmp_path / "two" / "a.txt", "two")]
    for letters in (one, two, one, two):
        for path in paths:
            assert letters.decode(encoded(path, letters, tmp_path / "cache")) == path.read_text()
    assert (one.num_calls, two.num_calls) == (2, 2)


DAMAGE = {
    "cut": lambda tokens, record: tokens.write_bytes(tokens.read_bytes()[:-1]),
    "shortened": lambda tokens, record: tokens.write_bytes(tokens.read_bytes()[:-4]),
    "gone": lambda tokens, record: tokens.unlink(),
    "no record": lambda tokens, record: record.unlink(),
    "no JSON": lambda tokens, record: record.write_text("{"),
    "other version": lambda tokens, record: record.write_text(
        json.dumps({**json.loads(record.read_text()), "version": 0})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_written_again(tmp_path: Path, damage: str) -> None:
    path, letters, cache = write(tmp_path / "a.txt", "abc"), Letters(), tmp_path / "cache"
    encoded(path, letters, cache)
    record, tokens = sorted(cache.iterdir())
    DAMAGE[damage](tokens, record)
    for _ in range(2):
        assert encoded(path, letters, cache).tolist() == [97, 98, 99]
        assert letters.num_calls == 2


def test_an_interrupted_encoding_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_PIECE", 4)
    path, cache = write(tmp_path / "a.txt", "abc\nabc\nabc\nab!\n"), tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        encoded(path, Letters(), cache)
    assert not list(cache.iterdir())


def test_a_failure_between_the_two_files_is_not_taken_for_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, letters, cache = write(tmp_path / "a.txt", "abc"), Letters(), tmp_path / "cache"
    encoded(path, letters, cache)
    write(path, "abd", mtime_ns=5)
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            encoded(path, letters, cache)
    write(path, "abc")  # as in the first record, while the tokens are those of the second text
    assert encoded(path, letters, cache).tolist() == [97, 98, 99]


def test_what_cannot_be_encoded_is_refused(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    write(path, "   ")
    with pytest.raises(DataError, match=r"'.*a.txt' is empty: tokenizer 'letters' makes no tokens"):
        encoded(path, Letters(), cache)
    assert not list(cache.iterdir())
    write(path, "ab\0")
    with pytest.raises(DataError, match="is not text: byte 2 is NUL"):
        encoded(path, Letters(), cache)
    write(path, "abc")
    (tmp_path / "file").touch()
    message = r"'.*a.txt' cannot be encoded into '.*tokens': File exists; name another cache"
    with pytest.raises(DataError, match=message):
        encoded(path, Letters(), tmp_path / "file")
