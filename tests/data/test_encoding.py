"""Encoded text: the tokens of the whole, in pieces, from a cache that is never stale."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from samo.data import encoding
from samo.data.encoding import encoded, pieces
from samo.data.tokenizers import Tokenizer, open_tokenizer
from samo.errors import DataError
from tests.data.trained_tokenizer import TEXT, save_trained_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(save_trained_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Letters:
    """Each character is its own token; counts how often it is asked."""

    name = "letters"
    fingerprint = "letters 1"

    def __init__(self, vocab_size: int = 2**21) -> None:
        self.vocab_size = vocab_size
        self.num_calls = 0

    def encode(self, text: str) -> NDArray[Any]:
        self.num_calls += 1
        return np.array([ord(letter) for letter in text if letter != " "], dtype=np.int64)

    def decode(self, ids: NDArray[Any]) -> str:
        return "".join(map(chr, ids))


# Pieces


@given(st.text(alphabet="ab \n\t\u00e9\u20ac\U0001f642"), st.integers(1, 12))
def test_pieces_join_to_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_PIECE_BYTES", size)
        found = list(pieces(path))
    assert "".join(found) == text
    # What waits for its line to end is at most two blocks (or a character that is cut), and one more
    # is read: the first cut may leave line ends before spaces, the second leaves none at all.
    assert all(len(piece.encode()) <= 3 * max(size, 4) for piece in found)


def test_pieces_end_with_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_PIECE_BYTES", 8)
    path = tmp_path / "a.txt"
    path.write_text("ab\ncd\n  ef\ngh\n\n\n\n\n\n\nij")
    assert list(pieces(path)) == ["ab\n", "cd\n  ef\n", "gh\n\n\n\n\n\n\n", "ij"]
    path.write_text("ab\n cd\n ef\n gh\n")
    assert list(pieces(path)) == ["ab\n cd\n", " ef\n gh\n"], "after a space if need be"


def test_tokens_of_pieces_are_those_of_the_whole_text(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT * 50, encoding="utf-8")
    for size in (150, 333, 1000):
        monkeypatch.setattr(encoding, "_PIECE_BYTES", size)
        assert len(list(pieces(path))) > 3
        assert np.array_equal(
            encoded(path, tokenizer, tmp_path / f"cache-{size}"), tokenizer.encode(TEXT * 50)
        )


@pytest.mark.parametrize(
    ("content", "offset", "byte"),
    [
        (b"one\ntwo\ncaf\xe9\n", 11, "e9"),
        (b"one\ntwo\n\xff", 8, "ff"),
        (b"one\ntwo\nthree\xe2\x82", 13, "e2"),
        (b"\xff", 0, "ff"),
    ],
    ids=["latin-1", "last byte", "cut short", "first byte"],
)
def test_text_that_is_not_utf8_is_refused_with_the_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, offset: int, byte: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    for size in (3, 5, 100):
        monkeypatch.setattr(encoding, "_PIECE_BYTES", size)
        with pytest.raises(
            DataError,
            match=rf"data file '.*a.txt' is not UTF-8: byte {offset} is 0x{byte} \(.*iconv",
        ):
            list(pieces(path))


# The cache


def write(path: Path, text: str, mtime_ns: int = 10**18) -> None:
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(mtime_ns, mtime_ns))


def test_tokens_are_mapped_from_a_file_as_narrow_as_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write(path, "abc")
    for vocab_size, dtype in [(2**16, np.uint16), (2**16 + 1, np.uint32)]:
        cache = tmp_path / f"{vocab_size}" / "deep"
        tokens = encoded(path, Letters(vocab_size), cache)
        assert tokens.tolist() == [97, 98, 99]
        assert tokens.dtype == dtype
        assert isinstance(tokens.base, np.memmap)
        names = sorted(file.name for file in cache.iterdir())
        assert len(names) == 2
        assert re.fullmatch(r"a\.txt-[0-9a-f]{12}\.json", names[0])
        assert names[1] == names[0].replace(".json", ".npy")
        assert np.load(cache / names[1]).tolist() == [97, 98, 99]


def test_a_file_is_encoded_once(tmp_path: Path) -> None:
    path, letters = tmp_path / "a.txt", Letters()
    write(path, "abc")
    first = encoded(path, letters, tmp_path / "cache")
    second = encoded(path, letters, tmp_path / "cache")
    assert np.array_equal(first, second)
    assert letters.num_calls == 1


def test_what_has_changed_is_encoded_again(tmp_path: Path) -> None:
    path, letters, cache = tmp_path / "a.txt", Letters(), tmp_path / "cache"
    write(path, "abc")
    encoded(path, letters, cache)
    write(path, "abcd")
    assert len(encoded(path, letters, cache)) == 4, "another size"
    write(path, "abce", mtime_ns=10**18 + 1)
    assert encoded(path, letters, cache)[-1] == ord("e"), "another time"


def test_tokenizers_are_kept_apart(tmp_path: Path) -> None:
    path, one, two = tmp_path / "a.txt", Letters(), Letters()
    two.fingerprint = "letters 2"
    write(path, "abc")
    for letters in (one, two, one, two):
        encoded(path, letters, tmp_path / "cache")
    assert (one.num_calls, two.num_calls) == (1, 1)
    records = [json.loads(file.read_text()) for file in (tmp_path / "cache").glob("*.json")]
    assert {record["tokenizer"] for record in records} == {"letters 1", "letters 2"}


def test_files_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    letters, cache = Letters(), tmp_path / "cache"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.txt", name)
    for name in ("one", "two", "one", "two"):
        tokens = encoded(tmp_path / name / "a.txt", letters, cache)
        assert letters.decode(tokens) == name
    assert letters.num_calls == 2


def cut(npy: Path, record: Path) -> None:
    npy.write_bytes(npy.read_bytes()[:-1])


def shorten(npy: Path, record: Path) -> None:
    np.save(npy, np.load(npy)[:-1])


def drop(npy: Path, record: Path) -> None:
    npy.unlink()


def forget(npy: Path, record: Path) -> None:
    record.unlink()


def garble(npy: Path, record: Path) -> None:
    record.write_text("{")


def outdate(npy: Path, record: Path) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), "version": 0}))


@pytest.mark.parametrize("damage", [cut, shorten, drop, forget, garble, outdate])
def test_a_damaged_cache_is_written_again(tmp_path: Path, damage: Any) -> None:
    path, letters, cache = tmp_path / "a.txt", Letters(), tmp_path / "cache"
    write(path, "abc")
    encoded(path, letters, cache)
    record, npy = sorted(cache.iterdir())
    damage(npy, record)
    assert encoded(path, letters, cache).tolist() == [97, 98, 99]
    assert letters.num_calls == 2
    encoded(path, letters, cache)
    assert letters.num_calls == 2


class Failing(Letters):
    """Gives up when it sees an x."""

    def encode(self, text: str) -> NDArray[Any]:
        if "x" in text:
            raise KeyboardInterrupt
        return super().encode(text)


def test_a_failure_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_PIECE_BYTES", 4)
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    write(path, "abc\nabc\nabx\n")
    with pytest.raises(KeyboardInterrupt):
        encoded(path, Failing(), cache)
    assert not list(cache.iterdir())


def test_a_failure_between_the_two_files_is_not_taken_for_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, letters, cache = tmp_path / "a.txt", Letters(), tmp_path / "cache"
    write(path, "abc")
    encoded(path, letters, cache)
    write(path, "abd", mtime_ns=5)
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            encoded(path, letters, cache)
    write(path, "abc")  # again as the first record has it, while the tokens are those of the second
    assert encoded(path, letters, cache).tolist() == [97, 98, 99]


def test_text_without_tokens_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "   ")
    with pytest.raises(
        DataError, match=r"'.*a.txt' is empty: tokenizer 'letters' makes no tokens of it"
    ):
        encoded(tmp_path / "a.txt", Letters(), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_binary_text_is_not_encoded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\0")
    with pytest.raises(DataError, match="is not text: byte 2 is NUL"):
        encoded(tmp_path / "a.txt", Letters(), tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "abc")
    (tmp_path / "cache").touch()
    with pytest.raises(
        DataError,
        match=r"'.*a.txt' cannot be encoded into '.*cache.*npy': File exists; name another cache",
    ):
        encoded(tmp_path / "a.txt", Letters(), tmp_path / "cache")
