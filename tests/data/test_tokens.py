"""Data files opened as a stream of tokens, its fingerprint and its splits."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from samo.data import files
from samo.data.files import map_token_file
from samo.data.standard_library import write_library_text
from samo.data.tokenizers import ByteTokenizer, Tokenizer, open_tokenizer
from samo.data.tokens import Tokens, open_tokens
from samo.errors import DataError
from tests.data.test_batches import counted
from tests.data.trained_tokenizer import TEXT, VOCAB_SIZE, save_trained_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(str(save_trained_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def stream(tokens: Tokens) -> list[int]:
    return [int(token) for segment in tokens.segments for token in segment]


def save(path: Path, *tokens: int) -> Path:
    if path.suffix == ".bin":
        np.array(tokens, dtype="<u2").tofile(path)
    else:
        np.save(path, np.array(tokens))
    return path


def open_bytes(*paths: Path, vocab_size: int | None = None) -> Tokens:
    cache = paths[0].parent / "cache"
    return open_tokens(paths, tokenizer=ByteTokenizer(), cache=cache, vocab_size=vocab_size)


# Fingerprints and splits


def test_fingerprint_does_not_depend_on_the_integer_type() -> None:
    arrays = [(np.arange(1000) % 100).astype(dtype) for dtype in ("u1", "<u2", ">u2", "i4", "i8")]
    (found,) = {Tokens([array], 100).fingerprint() for array in arrays}
    assert found.startswith("c4c99fd904f5b1c5")  # recorded in run.json: may not change


@settings(max_examples=20)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.data())
def test_fingerprint_sees_every_token_of_a_small_stream(
    sizes: list[int], data: st.DataObject
) -> None:
    tokens = counted(*sizes)
    owner = data.draw(st.integers(0, len(sizes) - 1))
    place = data.draw(st.integers(0, sizes[owner] - 1))
    changed = [segment.copy() for segment in tokens.segments]
    changed[owner][place] += 1
    assert Tokens(changed, 2000).fingerprint() != tokens.fingerprint()


def test_fingerprint_of_a_large_stream_sees_sizes_and_both_ends() -> None:
    array = np.zeros(2**26 + 5, dtype=np.uint8)  # too long to be read in full
    parts = [array[:4_000_000], array[4_000_000:]]
    found = {Tokens(each, 256).fingerprint() for each in ([array], parts, parts[::-1])}
    for place in (0, -1):
        array[place] = 1
        found.add(Tokens([array], 256).fingerprint())
        array[place] = 0
    assert len(found) == 5


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.floats(0.001, 0.999),
    st.integers(1, 30),
)
def test_split_is_one_cut(sizes: list[int], fraction: float, min_tokens: int) -> None:
    tokens = counted(*sizes)
    num_valid = max(round(tokens.num_tokens * fraction), min_tokens)
    try:
        train, valid = tokens.split(fraction, min_tokens)
    except DataError:
        assert tokens.num_tokens - num_valid < min_tokens
        return
    assert stream(train) + stream(valid) == list(range(1, tokens.num_tokens + 1))
    assert min(train.num_tokens, valid.num_tokens) >= min_tokens
    assert valid.num_tokens == num_valid
    assert train.vocab_size == valid.vocab_size == tokens.vocab_size
    assert np.shares_memory(train.segments[0], tokens.segments[0])


def test_too_few_tokens_for_a_split_are_refused() -> None:
    message = "1,000 tokens are too few to hold back 513 for validation and train on 513; use more"
    with pytest.raises(DataError, match=message):
        counted(1000).split(0.05, 513)
    assert [part.num_tokens for part in counted(1000).split(0.05, 500)] == [500, 500]


# Files


def test_text_is_mapped_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b.txt").write_bytes(b"\xff two")  # bytes need not be UTF-8
    tokens = open_bytes(tmp_path / "b.txt", tmp_path / "a.txt")
    assert [segment.tobytes() for segment in tokens.segments] == [b"\xff two", b"one"]
    assert (tokens.num_tokens, tokens.vocab_size) == (8, 256)
    assert not (tmp_path / "cache").exists()
    for segment in tokens.segments:
        assert isinstance(segment.base, np.memmap)
        assert type(segment) is np.ndarray  # slices of np.memmap are slow


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "u4", "i8", "u8", "bin"])
def test_token_files_of_any_integer_are_mapped(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(100)
    path = tmp_path / ("a.bin" if dtype == "bin" else "a.npy")
    if dtype == "bin":  # always 16 bits, little endian
        tokens.astype("<u2").tofile(path)
    else:
        np.save(path, tokens.astype(dtype))
    mapped = map_token_file(path)
    assert mapped.tolist() == tokens.tolist()
    assert isinstance(mapped.base, np.memmap)
    assert open_bytes(path).vocab_size == 100  # of the largest token


def test_tokens_must_be_in_the_vocabulary(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="is 65,535, but the vocabulary has 65,535"):
        open_bytes(save(tmp_path / "a.bin", 2**16 - 1), vocab_size=2**16 - 1)
    path = save(tmp_path / "a.bin", 5, 7, 0)
    for vocab_size in (8, 50304, 2**17):
        assert open_bytes(path, vocab_size=vocab_size).vocab_size == vocab_size
    with pytest.raises(DataError, match=r"'.*a.bin': token 1 is 7, but the vocabulary has 7 tok"):
        open_bytes(path, vocab_size=7)
    good, bad = save(tmp_path / "good.bin", 299), save(tmp_path / "bad.bin", 300)
    cache = tmp_path / "cache"
    assert open_tokens([good], tokenizer=tokenizer, cache=cache).vocab_size == VOCAB_SIZE
    with pytest.raises(DataError, match=r"'.*bad.bin': token 0 is 300, but the vocabulary has 300"):
        open_tokens([good, bad], tokenizer=tokenizer, cache=cache)
    (tmp_path / "a.txt").write_bytes(b"one")  # with text, the vocabulary is that of bytes
    assert open_bytes(tmp_path / "a.txt", path).vocab_size == 256
    with pytest.raises(DataError, match=r"'.*bad.bin': token 0 is 300, but the vocabulary has 256"):
        open_bytes(tmp_path / "a.txt", bad)


@pytest.mark.parametrize("vocab_size", [None, 2**31])
@pytest.mark.parametrize("token", [-1, 2**31, 2**62])
def test_numbers_that_are_not_tokens_are_refused(
    tmp_path: Path, token: int, vocab_size: int | None
) -> None:
    path = save(tmp_path / "a.npy", 1, token)
    with pytest.raises(DataError, match=rf"'.*a.npy': token 1 is {token:,}, but the vocabulary"):
        open_bytes(path, vocab_size=vocab_size)


def test_text_is_encoded_into_the_cache_after_all_files_are_checked(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    paths, cache = [tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "cache"
    with pytest.raises(DataError, match=r"'.*b.txt' does not exist \(did you mean 'a.txt'\?\)"):
        open_tokens(paths, tokenizer=tokenizer, cache=cache)
    assert not cache.exists()
    tokens = open_tokens(paths[:1], tokenizer=tokenizer, cache=cache)
    assert tokenizer.decode(tokens.segments[0]) == TEXT
    assert tokens.vocab_size == VOCAB_SIZE
    assert len(list(cache.glob("*.tokens"))) == 1


# Files that are refused


def test_a_path_that_is_not_a_data_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.npy").touch()
    (tmp_path / "odd.bin").write_bytes(b"x" * 1235)
    (tmp_path / "zip.npy").write_bytes(b"PK" * 100)
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "": r"is a folder; pass its files, such as .*/\*\.txt",
        "pipe": "is not a regular file and cannot be memory-mapped",
        "empty.npy": "is empty",
        "odd.bin": "has 1,235 bytes, an odd number; a .bin file",
        "zip.npy": r"cannot be read as \.npy: .*magic",
        "no/such": "does not exist",
        "x" * 300: "cannot be read: File name too long",
    }.items():
        with pytest.raises(DataError, match=message):
            open_bytes(tmp_path / name)
    monkeypatch.setattr(np, "memmap", mock.Mock(side_effect=OSError(24, "Too many open files")))
    with pytest.raises(DataError, match=r"odd.txt' cannot be mapped: Too many open files; check"):
        open_bytes((tmp_path / "odd.bin").rename(tmp_path / "odd.txt"))


def test_binary_instead_of_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 2_000_000 + b"\0tail\0")
    with pytest.raises(DataError, match=r"is not text: byte 2,000,000 is NUL; name token files"):
        open_bytes(path)
    monkeypatch.setattr(files, "_HEAD_BYTES", 10)
    assert open_bytes(path).num_tokens == 2_000_006, "only the head is searched"


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4), dtype=np.int64), r"shape \(3, 4\) and type int64; tokens must"),
        (np.int64(3), r"shape \(\) and type int64"),
        (np.zeros(5), r"shape \(5,\) and type float64"),
        (np.zeros(5, dtype=bool), r"shape \(5,\) and type bool"),
        (np.zeros(0, dtype=np.int64), r"shape \(0,\) and type int64; tokens must be a non-empty"),
        (np.array([print, 1], dtype=object), r"cannot be read as .npy: .*objects.*; write a 1-D"),
    ],
    ids=["matrix", "scalar", "float", "bool", "empty", "pickled"],
)
def test_an_array_that_is_not_of_tokens_is_refused(
    tmp_path: Path, array: Any, message: str
) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=f"'.*a.npy' .*{message}"):
        open_bytes(tmp_path / "a.npy")


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_npy_file_gives_tokens_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npy"
    np.save(path, np.arange(40, dtype=np.uint16))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, 100))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        tokens = map_token_file(path)
    except DataError:
        return
    assert (tokens.ndim, tokens.dtype.kind in "iu") == (1, True)


# The text of the standard library


def test_library_text_takes_every_tenth_file_for_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, out = tmp_path / "python", tmp_path / "deep" / "out"
    library.mkdir()
    monkeypatch.setattr(os, "__file__", str(library / "os.py"))
    with pytest.raises(DataError, match="this Python has no source files in"):
        write_library_text(out)
    for number in range(25):
        (library / f"{number:02}.py").write_text(f"text {number} \u00e9\n", encoding="utf-8")
    (library / "03.py").write_bytes(b"# latin-1: \xe9\n")  # left out
    train, valid = write_library_text(out)
    texts = [f"text {number} \u00e9" for number in range(25) if number != 3]
    assert valid.read_text("utf-8").splitlines() == texts[::10]
    assert sorted([*train.read_text("utf-8").splitlines(), *texts[::10]]) == sorted(texts)
    with valid.open("rb") as opened:  # as a run that has it mapped would
        (library / "00.py").write_text("new")
        write_library_text(out)
        assert opened.read().startswith(b"text 0")
    with pytest.raises(DataError, match=r"cannot write to '.*train.txt': File exists"):
        write_library_text(train)
