"""Data files as arrays on disk: what is mapped, and each kind of file that is refused."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from samo.data import files
from samo.data.files import check_readable, largest_token, map_text, map_token_file
from samo.errors import DataError


def test_text_is_mapped_and_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xc3\xa9")
    mapped = map_text(path)
    assert mapped.tobytes() == b"caf\xc3\xa9"
    assert isinstance(mapped.base, np.memmap)
    assert type(mapped) is np.ndarray  # slices of np.memmap are slow


def test_bin_files_are_16_bit_little_endian(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"\x01\x00\x00\x01")
    mapped = map_token_file(path)
    assert mapped.tolist() == [1, 256]
    assert isinstance(mapped.base, np.memmap)


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "u4", "i8", "u8"])
def test_npy_files_of_any_integer_are_mapped(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100).astype(dtype))
    mapped = map_token_file(path)
    assert mapped.tolist() == list(range(100))
    assert isinstance(mapped.base, np.memmap)


# What is refused


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("x")
    with pytest.raises(
        DataError,
        match=r"data file '.*shakespear.txt' does not exist \(did you mean 'shakespeare.txt'\?\)$",
    ):
        check_readable(tmp_path / "shakespear.txt")
    with pytest.raises(
        DataError, match=r"does not exist; folder '.*' has no file of a similar name$"
    ):
        check_readable(tmp_path / "0000")
    with pytest.raises(
        DataError,
        match=r"data file 'no/such' does not exist, and its folder 'no' cannot be listed: No such file",
    ):
        check_readable(Path("no/such"))


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"is a folder; name the files in it, for example .*/\*\.txt"
    ):
        check_readable(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        DataError, match=r"'.*pipe' is not a plain file.*; write its contents to a file"
    ):
        check_readable(tmp_path / "pipe")


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")

    def refuse(self: Path, mode: str) -> None:  # for an administrator, every file is readable
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        DataError,
        match=r"'.*a.txt' cannot be read: Permission denied; check its owner and permissions",
    ):
        check_readable(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.npy"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=f"data file '.*{name}' is empty; check how it was written"):
        check_readable(tmp_path / name)


def test_a_file_with_contents_is_readable(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    check_readable(tmp_path / "a.txt")


@pytest.mark.parametrize("position", [0, 5, 2_000_000])
def test_binary_where_text_is_expected_is_refused(tmp_path: Path, position: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * position + b"\0tail\0")
    with pytest.raises(
        DataError,
        match=rf"'.*a.txt' is not text: byte {position:,} is NUL; .* are named \.npy .* or \.bin",
    ):
        map_text(path)


def test_only_the_head_of_a_text_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_HEAD_BYTES", 10)
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 10 + b"\0")
    assert len(map_text(path)) == 11


def test_half_a_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"x" * 1235)
    with pytest.raises(
        DataError, match=r"'.*a.bin' has 1,235 bytes, an odd number; a .bin file holds"
    ):
        map_token_file(path)


@pytest.mark.parametrize(
    ("array", "shape", "dtype"),
    [
        (np.zeros((3, 4), dtype=np.int64), r"\(3, 4\)", "int64"),
        (np.int64(3), r"\(\)", "int64"),
        (np.zeros(5), r"\(5,\)", "float64"),
        (np.zeros(5, dtype=bool), r"\(5,\)", "bool"),
    ],
    ids=["matrix", "scalar", "float", "bool"],
)
def test_an_array_that_is_not_of_tokens_is_refused(
    tmp_path: Path, array: Any, shape: str, dtype: str
) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(
        DataError,
        match=rf"'.*a.npy' holds an array of shape {shape} and type {dtype}; tokens are a 1-D array",
    ):
        map_token_file(tmp_path / "a.npy")


def test_an_array_without_tokens_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(0, dtype=np.int64))
    with pytest.raises(DataError, match=r"'.*a.npy' is empty: its array has no tokens"):
        map_token_file(tmp_path / "a.npy")


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([print, 1], dtype=object), allow_pickle=True)
    with pytest.raises(
        DataError, match=r"'.*a.npy' cannot be read as .npy: .*objects.*; write a 1-D"
    ):
        map_token_file(tmp_path / "a.npy")


def test_what_is_only_named_npy_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", np.arange(9))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(DataError, match=r"'.*a.npy' cannot be read as .npy: .*magic"):
        map_token_file(tmp_path / "a.npy")


@settings(max_examples=300)
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
    assert tokens.ndim == 1
    assert tokens.dtype.kind in "iu"


# Tokens in range


def test_the_largest_token_is_found_in_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK", 10)
    for place in (0, 9, 10, 24):
        tokens = np.arange(25) % 3
        tokens[place] = 77
        assert largest_token(Path("a.npy"), tokens, 78) == 77


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.int64, np.uint64])
def test_a_token_past_the_vocabulary_is_refused_with_its_place(
    monkeypatch: pytest.MonkeyPatch, dtype: type[np.integer[Any]]
) -> None:
    monkeypatch.setattr(files, "_CHUNK", 1000)
    tokens = np.zeros(5000, dtype=dtype)
    tokens[[4321, 4400]] = 2000, 3000
    with pytest.raises(
        DataError,
        match=r"data file 'a.npy': token 4,321 is 2,000; tokens are 0 to 1,999, so the vocabulary "
        r"\(--vocab-size\) is too small",
    ):
        largest_token(Path("a.npy"), tokens, 2000)
    assert largest_token(Path("a.npy"), tokens, 3001) == 3000


def test_a_negative_token_is_refused() -> None:
    with pytest.raises(DataError, match=r"'a.npy': token 2 is -1; tokens are 0 to 9"):
        largest_token(Path("a.npy"), np.array([1, 2, -1, 3]), 10)
