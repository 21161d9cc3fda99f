"""Tokens: streams of segments, their fingerprints and splits, and files opened as such."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from samo.data.tokenizers import ByteTokenizer, open_tokenizer
from samo.data.tokens import Tokens, open_tokens
from samo.errors import DataError
from tests.data.trained_tokenizer import TEXT, VOCAB_SIZE, save_trained_tokenizer


def stream(tokens: Tokens) -> list[int]:
    return [int(token) for segment in tokens.segments for token in segment]


def counted(*sizes: int) -> Tokens:
    """Return segments whose tokens count up through all of them."""
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
    array[0] = 1  # the caller's own array stays as it was


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 2), dtype=int)], ids=["float", "2-D"])
def test_a_segment_of_something_else_is_refused(array: Any) -> None:
    with pytest.raises(ValueError, match=r"a segment has shape .* and type .*; segments are 1-D"):
        Tokens([array], vocab_size=5)


@pytest.mark.parametrize("vocab_size", [0, -5, 2**31 + 1])
def test_a_vocabulary_out_of_range_is_refused(vocab_size: int, tmp_path: Path) -> None:
    message = rf"vocab_size must be 1 to 2,147,483,648, got {vocab_size:,}"
    with pytest.raises(ValueError, match=message):
        Tokens([np.arange(3)], vocab_size)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=message):
        open_tokens(
            tmp_path / "a.txt", tokenizer=ByteTokenizer(), cache=tmp_path, vocab_size=vocab_size
        )


# Fingerprints


def test_a_fingerprint_does_not_depend_on_the_integer_type() -> None:
    arrays = [(np.arange(1000) % 100).astype(dtype) for dtype in ("u1", "<u2", ">u2", "i4", "i8")]
    assert len({Tokens([array], 100).fingerprint() for array in arrays}) == 1


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


def test_a_fingerprint_sees_every_token_up_to_a_million() -> None:
    array = np.zeros(2**20, dtype=np.uint8)
    before = Tokens([array], 256).fingerprint()
    for place in np.linspace(0, 2**20 - 1, 40).astype(int):
        array[place] = 1
        assert Tokens([array], 256).fingerprint() != before
        array[place] = 0


def test_a_fingerprint_sees_where_segments_end_and_the_ends_of_a_large_stream() -> None:
    array = np.zeros(5_000_000, dtype=np.uint8)
    parts = [array[:4_000_000], array[4_000_000:]]
    assert Tokens([array], 256).fingerprint() != Tokens(parts, 256).fingerprint()
    assert Tokens(parts, 256).fingerprint() != Tokens(parts[::-1], 256).fingerprint()
    before = Tokens([array], 256).fingerprint()
    for place in (0, -1):
        array[place] = 1
        assert Tokens([array], 256).fingerprint() != before
        array[place] = 0


# Splits


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.floats(0.001, 0.999),
    st.integers(0, 30),
)
def test_a_split_is_one_cut(sizes: list[int], fraction: float, min_tokens: int) -> None:
    tokens = counted(*sizes)
    try:
        train, valid = tokens.split(fraction, min_tokens)
    except DataError:
        wanted = max(round(tokens.num_tokens * fraction), min_tokens, 1)
        assert tokens.num_tokens - wanted < max(min_tokens, 1)
        return
    assert stream(train) + stream(valid) == list(range(tokens.num_tokens))
    assert min(train.num_tokens, valid.num_tokens) >= max(min_tokens, 1)
    assert valid.num_tokens == max(round(tokens.num_tokens * fraction), min_tokens, 1)
    assert train.vocab_size == valid.vocab_size == tokens.vocab_size
    cut, ends = train.num_tokens, set(np.cumsum(sizes).tolist())
    assert len(train.segments) + len(valid.segments) == len(sizes) + (cut not in ends)


def test_a_split_maps_and_does_not_copy() -> None:
    array = np.arange(100)
    for part in Tokens([array], 100).split(0.5, 1):
        assert np.shares_memory(part.segments[0], array)


def test_too_few_tokens_to_split_are_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"1,000 tokens are too few to hold back 513 of them and to train on at least 513; "
        r"give more text, a smaller --context or",
    ):
        counted(1000).split(0.05, 513)
    assert [part.num_tokens for part in counted(1000).split(0.05, 500)] == [500, 500]


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(
        ValueError, match=f"valid_fraction must be above 0 and below 1, got {fraction}"
    ):
        counted(100).split(fraction, 1)


# Files


def test_bytes_of_text_are_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b.txt").write_bytes(b"\xff two")  # bytes need not be UTF-8
    paths = [tmp_path / "b.txt", str(tmp_path / "a.txt")]
    tokens = open_tokens(paths, tokenizer=ByteTokenizer(), cache=tmp_path / "cache")
    assert [segment.tobytes() for segment in tokens.segments] == [b"\xff two", b"one"]
    assert (tokens.num_tokens, tokens.vocab_size) == (8, 256)
    assert not (tmp_path / "cache").exists()


def test_a_single_path_is_a_file_and_not_its_letters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one")
    for path in (tmp_path / "a.txt", str(tmp_path / "a.txt")):
        assert len(open_tokens(path, tokenizer=ByteTokenizer(), cache=tmp_path).segments) == 1


def test_other_tokenizers_encode_into_the_cache(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(save_trained_tokenizer(tmp_path))
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    tokens = open_tokens(tmp_path / "a.txt", tokenizer=tokenizer, cache=tmp_path / "cache")
    assert tokenizer.decode(tokens.segments[0]) == TEXT
    assert tokens.vocab_size == VOCAB_SIZE
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 1


def save_bin(path: Path, *tokens: int) -> Path:
    np.array(tokens, dtype="<u2").tofile(path)
    return path


def save_npy(path: Path, *tokens: int) -> Path:
    np.save(path, np.array(tokens))
    return path


def test_token_files_alone_have_the_vocabulary_of_their_largest_token(tmp_path: Path) -> None:
    paths = [
        save_bin(tmp_path / "a.bin", 5, 7, 0),
        save_npy(tmp_path / "b.npy", 4000, 1),
        save_npy(tmp_path / "c.npy", 3),
    ]
    tokens = open_tokens(paths, tokenizer=ByteTokenizer(), cache=tmp_path)
    assert stream(tokens) == [5, 7, 0, 4000, 1, 3]
    assert tokens.vocab_size == 4001


def test_a_vocabulary_that_is_given_holds(tmp_path: Path) -> None:
    path = save_bin(tmp_path / "a.bin", 5, 7, 0)
    for vocab_size in (8, 50304, 2**17):
        tokens = open_tokens(path, tokenizer=ByteTokenizer(), cache=tmp_path, vocab_size=vocab_size)
        assert tokens.vocab_size == vocab_size
    with pytest.raises(DataError, match=r"'.*a.bin': token 1 is 7; tokens are 0 to 6"):
        open_tokens(path, tokenizer=ByteTokenizer(), cache=tmp_path, vocab_size=7)


def test_token_files_must_fit_a_tokenizer_that_is_given(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(save_trained_tokenizer(tmp_path))
    good = save_bin(tmp_path / "good.bin", VOCAB_SIZE - 1)
    assert open_tokens(good, tokenizer=tokenizer, cache=tmp_path).vocab_size == VOCAB_SIZE
    bad = save_bin(tmp_path / "bad.bin", VOCAB_SIZE)
    with pytest.raises(DataError, match=r"'.*bad.bin': token 0 is 300; tokens are 0 to 299"):
        open_tokens([good, bad], tokenizer=tokenizer, cache=tmp_path)


def test_token_files_beside_text_must_be_bytes_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one")
    good, bad = save_bin(tmp_path / "good.bin", 255), save_bin(tmp_path / "bad.bin", 256)
    tokens = open_tokens([tmp_path / "a.txt", good], tokenizer=ByteTokenizer(), cache=tmp_path)
    assert tokens.vocab_size == 256
    with pytest.raises(DataError, match=r"'.*bad.bin': token 0 is 256; tokens are 0 to 255"):
        open_tokens([tmp_path / "a.txt", bad], tokenizer=ByteTokenizer(), cache=tmp_path)


@pytest.mark.parametrize("token", [-1, 2**31, 2**62])
def test_numbers_that_are_no_tokens_are_refused(tmp_path: Path, token: int) -> None:
    path = save_npy(tmp_path / "a.npy", 1, token)
    with pytest.raises(DataError, match=rf"'.*a.npy': token 1 is {token:,}; tokens are 0 to"):
        open_tokens(path, tokenizer=ByteTokenizer(), cache=tmp_path)
    with pytest.raises(DataError, match=rf"'.*a.npy': token 1 is {token:,}; tokens are 0 to"):
        open_tokens(path, tokenizer=ByteTokenizer(), cache=tmp_path, vocab_size=2**31)


def test_the_largest_number_of_a_type_is_checked_too(tmp_path: Path) -> None:
    path = save_bin(tmp_path / "a.bin", 2**16 - 1)
    with pytest.raises(DataError, match=r"token 0 is 65,535; tokens are 0 to 65,534"):
        open_tokens(path, tokenizer=ByteTokenizer(), cache=tmp_path, vocab_size=2**16 - 1)
    np.save(tmp_path / "b.npy", np.array([3, -1], dtype=np.int16))
    with pytest.raises(DataError, match=r"token 1 is -1; tokens are 0 to 99,999"):
        open_tokens(
            tmp_path / "b.npy", tokenizer=ByteTokenizer(), cache=tmp_path, vocab_size=100_000
        )


def test_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data files are given; name at least one"):
        open_tokens([], tokenizer=ByteTokenizer(), cache=tmp_path)


def test_every_file_is_looked_at_before_any_is_encoded(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(save_trained_tokenizer(tmp_path))
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    with pytest.raises(DataError, match=r"'.*b.txt' does not exist"):
        open_tokens(
            [tmp_path / "a.txt", tmp_path / "b.txt"], tokenizer=tokenizer, cache=tmp_path / "cache"
        )
    assert not (tmp_path / "cache").exists()


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(
        DataError,
        match=r"'.*a.txt', number 1 of 2, cannot be mapped: Too many open files; join small files",
    ):
        open_tokens(sorted(tmp_path.glob("*.txt")), tokenizer=ByteTokenizer(), cache=tmp_path)
