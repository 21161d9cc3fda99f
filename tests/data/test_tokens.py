"""Tokens: streams of segments, their fingerprints and splits, and files opened as such."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from samo.data.tokenizers import ByteTokenizer, Tokenizer, open_tokenizer
from samo.data.tokens import Tokens, open_tokens
from samo.errors import DataError
from tests.data.trained_tokenizer import TEXT, VOCAB_SIZE, save_trained_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(save_trained_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def stream(tokens: Tokens) -> list[int]:
    return [int(token) for segment in tokens.segments for token in segment]


def counted(*sizes: int) -> Tokens:
    """Return segments whose tokens count up across all of them."""
    ends = np.cumsum(sizes)
    segments = [np.arange(end - size, end) for end, size in zip(ends, sizes)]
    return Tokens(segments, vocab_size=int(ends[-1]))


# The stream


def test_tokens_cannot_be_changed() -> None:
    array = np.arange(5)
    tokens = Tokens([array], vocab_size=5)
    with pytest.raises(ValueError, match="read-only"):
        tokens.segments[0][0] = 1
    with pytest.raises(AttributeError):
        tokens.other = 1
    array[0] = 1  # the caller's own array stays writable


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 2), dtype=int)], ids=["float", "2-D"])
def test_a_segment_of_something_else_is_refused(array: Any) -> None:
    with pytest.raises(ValueError, match=r"a segment has shape .* and type .*; segments are 1-D"):
        Tokens([array], vocab_size=5)


@pytest.mark.parametrize("vocab_size", [0, -5, 2**31 + 1])
def test_a_vocabulary_out_of_range_is_refused(vocab_size: int, tmp_path: Path) -> None:
    message = rf"vocab_size must be 1 to 2,147,483,648, got {vocab_size:,}"
    with pytest.raises(ValueError, match=message):
        Tokens([np.arange(3)], vocab_size)
    with pytest.raises(ValueError, match=message):
        open_tokens("a.txt", tokenizer=ByteTokenizer(), cache=tmp_path, vocab_size=vocab_size)


# Fingerprints


def test_a_fingerprint_does_not_depend_on_the_integer_type() -> None:
    arrays = [(np.arange(1000) % 100).astype(dtype) for dtype in ("u1", "<u2", ">u2", "i4", "i8")]
    assert len({Tokens([array], 100).fingerprint() for array in arrays}) == 1


@settings(max_examples=50)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.data())
def test_a_fingerprint_sees_every_token_of_a_small_stream(
    sizes: list[int], data: st.DataObject
) -> None:
    tokens = counted(*sizes)
    owner = data.draw(st.integers(0, len(sizes) - 1))
    place = data.draw(st.integers(0, sizes[owner] - 1))
    changed = [segment.copy() for segment in tokens.segments]
    changed[owner][place] += 1
    assert Tokens(changed, 2000).fingerprint() != tokens.fingerprint()


def test_a_fingerprint_of_a_large_stream_sees_sizes_and_both_ends() -> None:
    array = np.zeros(2**26 + 5, dtype=np.uint8)  # too long to be read in full
    parts = [array[:4_000_000], array[4_000_000:]]
    before = Tokens([array], 256).fingerprint()
    found = {before, Tokens(parts, 256).fingerprint(), Tokens(parts[::-1], 256).fingerprint()}
    for place in (0, -1):
        array[place] = 1
        found.add(Tokens([array], 256).fingerprint())
        array[place] = 0
    assert len(found) == 5


# Splits


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.floats(0.001, 0.999),
    st.integers(0, 30),
)
def test_a_split_is_one_cut(sizes: list[int], fraction: float, min_tokens: int) -> None:
    tokens = counted(*sizes)
    num_valid = max(round(tokens.num_tokens * fraction), min_tokens, 1)
    try:
        train, valid = tokens.split(fraction, min_tokens)
    except DataError:
        assert tokens.num_tokens - num_valid < max(min_tokens, 1)
        return
    assert stream(train) + stream(valid) == list(range(tokens.num_tokens))
    assert min(train.num_tokens, valid.num_tokens) >= max(min_tokens, 1)
    assert valid.num_tokens == num_valid
    assert train.vocab_size == valid.vocab_size == tokens.vocab_size
    assert np.shares_memory(train.segments[0], tokens.segments[0])
    is_inside = train.num_tokens not in np.cumsum(sizes)
    assert len(train.segments) + len(valid.segments) == len(sizes) + is_inside


def test_what_cannot_be_split_is_refused() -> None:
    message = "1,000 tokens are too few to hold back 513 .* train on at least 513; give more text"
    with pytest.raises(DataError, match=message):
        counted(1000).split(0.05, 513)
    assert [part.num_tokens for part in counted(1000).split(0.05, 500)] == [500, 500]
    for fraction in (0, 1, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=f"must be above 0 and below 1, got {fraction}"):
            counted(100).split(fraction, 1)


# Files


def save(path: Path, *tokens: int) -> Path:
    if path.suffix == ".bin":
        np.array(tokens, dtype="<u2").tofile(path)
    else:
        np.save(path, np.array(tokens))
    return path


def open_bytes(paths: Any, folder: Path, vocab_size: int | None = None) -> Tokens:
    return open_tokens(
        paths, tokenizer=ByteTokenizer(), cache=folder / "cache", vocab_size=vocab_size
    )


def test_bytes_of_text_are_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b.txt").write_bytes(b"\xff two")  # bytes need not be UTF-8
    tokens = open_bytes([tmp_path / "b.txt", str(tmp_path / "a.txt")], tmp_path)
    assert [segment.tobytes() for segment in tokens.segments] == [b"\xff two", b"one"]
    assert (tokens.num_tokens, tokens.vocab_size) == (8, 256)
    assert not (tmp_path / "cache").exists()
    for path in (tmp_path / "a.txt", str(tmp_path / "a.txt")):
        assert len(open_bytes(path, tmp_path).segments) == 1, "one path, not its letters"


def test_other_tokenizers_encode_into_the_cache(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    tokens = open_tokens(tmp_path / "a.txt", tokenizer=tokenizer, cache=tmp_path / "cache")
    assert tokenizer.decode(tokens.segments[0]) == TEXT
    assert tokens.vocab_size == VOCAB_SIZE
    assert len(list((tmp_path / "cache").glob("*.tokens"))) == 1


def test_token_files_alone_have_the_vocabulary_of_their_largest_token(tmp_path: Path) -> None:
    tokens = open_bytes(
        [
            save(tmp_path / "a.bin", 5, 7, 0),
            save(tmp_path / "b.npy", 4000, 1),
            save(tmp_path / "c.npy", 3),
        ],
        tmp_path,
    )
    assert (stream(tokens), tokens.vocab_size) == ([5, 7, 0, 4000, 1, 3], 4001)


def test_token_files_must_fit_the_vocabulary(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = save(tmp_path / "a.bin", 5, 7, 0)
    for vocab_size in (8, 50304, 2**17):
        assert open_bytes(path, tmp_path, vocab_size).vocab_size == vocab_size
    with pytest.raises(DataError, match=r"'.*a.bin': token 1 is 7; tokens are 0 to 6"):
        open_bytes(path, tmp_path, 7)
    good, bad = save(tmp_path / "good.bin", 299), save(tmp_path / "bad.bin", 300)
    assert open_tokens(good, tokenizer=tokenizer, cache=tmp_path).vocab_size == VOCAB_SIZE
    with pytest.raises(DataError, match=r"'.*bad.bin': token 0 is 300; tokens are 0 to 299"):
        open_tokens([good, bad], tokenizer=tokenizer, cache=tmp_path)
    (tmp_path / "a.txt").write_bytes(b"one")  # bytes, so that tokens beside them are bytes too
    assert open_bytes([tmp_path / "a.txt", path], tmp_path).vocab_size == 256
    with pytest.raises(DataError, match=r"'.*bad.bin': token 0 is 300; tokens are 0 to 255"):
        open_bytes([tmp_path / "a.txt", bad], tmp_path)


@pytest.mark.parametrize("token", [-1, 2**31, 2**62])
@pytest.mark.parametrize("vocab_size", [None, 2**31])
def test_numbers_that_are_not_tokens_are_refused(
    tmp_path: Path, token: int, vocab_size: int | None
) -> None:
    path = save(tmp_path / "a.npy", 1, token)
    with pytest.raises(DataError, match=rf"'.*a.npy': token 1 is {token:,}; tokens are 0 to"):
        open_bytes(path, tmp_path, vocab_size)


def test_the_largest_number_of_a_type_is_checked_too(tmp_path: Path) -> None:
    path = save(tmp_path / "a.bin", 2**16 - 1)
    with pytest.raises(DataError, match=r"token 0 is 65,535; tokens are 0 to 65,534"):
        open_bytes(path, tmp_path, 2**16 - 1)
    np.save(tmp_path / "b.npy", np.array([3, -1], dtype=np.int16))
    with pytest.raises(DataError, match=r"token 1 is -1; tokens are 0 to 99,999"):
        open_bytes(tmp_path / "b.npy", tmp_path, 100_000)


def test_missing_files_are_refused_before_any_is_encoded(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(DataError, match="no data files; name at least one"):
        open_bytes([], tmp_path)
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    with pytest.raises(DataError, match=r"'.*b.txt' does not exist"):
        open_tokens(paths, tokenizer=tokenizer, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(24, "Too many open files")

    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(np, "memmap", refuse)
    message = r"'.*a.txt', number 1 of 2, cannot be mapped: Too many open files; join small files"
    with pytest.raises(DataError, match=message):
        open_bytes(sorted(tmp_path.glob("*.txt")), tmp_path)
