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
    check_readable(path)
    mapped = map_text(path)
    assert mapped.tobytes() == b"caf\xc3\xa9"
    assert isinstance(mapped.base, np.memmap)
    assert type(mapped) is np.ndarray  # slices of np.memmap are slow


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "u4", "i8", "u8", "bin"])
def test_token_files_of_any_integer_are_mapped(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(100)
    if dtype == "bin":  # always 16 bits, little endian
        path = tmp_path / "a.bin"
        path.write_bytes(b"".join(int(token).to_bytes(2, "little") for token in tokens))
    else:
        path = tmp_path / "a.npy"
        np.save(path, tokens.astype(dtype))
    mapped = map_token_file(path)
    assert mapped.tolist() == tokens.tolist()
    assert isinstance(mapped.base, np.memmap)


# What is refused


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("x")
    for path, message in {
        tmp_path / "shakespear.txt": r"does not exist \(did you mean 'shakespeare.txt'\?\)$",
        tmp_path / "0000": r"does not exist; folder '.*' has no file of a similar name$",
        Path("no/such"): "does not exist, and folder 'no' cannot be listed: No such file",
    }.items():
        with pytest.raises(DataError, match=rf"data file '.*{path.name}' {message}"):
            check_readable(path)


def test_a_folder_a_pipe_and_an_unreadable_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"is a folder; name the files in it, .*/\*\.txt"):
        check_readable(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"'.*pipe' is not a regular file.*; write its contents to"):
        check_readable(tmp_path / "pipe")
    (tmp_path / "a.txt").write_text("x")

    def refuse(self: Path, mode: str) -> None:  # root can read every file
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    message = r"'.*a.txt' cannot be read: Permission denied; check its owner and permissions"
    with pytest.raises(DataError, match=message):
        check_readable(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.npy"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=f"data file '.*{name}' is empty; check how it was written"):
        check_readable(tmp_path / name)


def test_binary_where_text_is_expected_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    for position in (0, 5, 2_000_000):
        path.write_bytes(b"x" * position + b"\0tail\0")
        message = rf"is not text: byte {position:,} is NUL; .* are named \.npy .* or \.bin"
        with pytest.raises(DataError, match=message):
            map_text(path)
    monkeypatch.setattr(files, "_HEAD_BYTES", 10)
    path.write_bytes(b"x" * 10 + b"\0")
    assert len(map_text(path)) == 11, "only the head is searched"


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.zeros((3, 4), dtype=np.int64),
            r"shape \(3, 4\) and type int64; tokens are a 1-D array",
        ),
        (np.int64(3), r"shape \(\) and type int64; tokens"),
        (np.zeros(5), r"shape \(5,\) and type float64; tokens"),
        (np.zeros(5, dtype=bool), r"shape \(5,\) and type bool; tokens"),
        (np.zeros(0, dtype=np.int64), "is empty: its array has no tokens"),
        (np.array([print, 1], dtype=object), r"cannot be read as .npy: .*objects.*; write a 1-D"),
    ],
    ids=["matrix", "scalar", "float", "bool", "empty", "pickled"],
)
def test_an_array_that_is_not_of_tokens_is_refused(
    tmp_path: Path, array: Any, message: str
) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=f"'.*a.npy' .*{message}"):
        map_token_file(tmp_path / "a.npy")


def test_what_its_name_does_not_say_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", np.arange(9))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(DataError, match=r"'.*a.npy' cannot be read as .npy: .*magic"):
        map_token_file(tmp_path / "a.npy")
    (tmp_path / "a.bin").write_bytes(b"x" * 1235)
    with pytest.raises(DataError, match=r"'.*a.bin' has 1,235 bytes, an odd number; a .bin file"):
        map_token_file(tmp_path / "a.bin")


@settings(max_examples=100)
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


# Tokens in range


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.int64, np.uint64])
def test_a_token_past_the_vocabulary_is_refused_with_its_place(
    monkeypatch: pytest.MonkeyPatch, dtype: type[np.integer[Any]]
) -> None:
    monkeypatch.setattr(files, "_CHUNK", 1000)
    path, tokens = Path("a.npy"), np.zeros(5000, dtype=dtype)
    tokens[[4321, 4400]] = 2000, 3000
    message = r"'a.npy': token 4,321 is 2,000; tokens are 0 to 1,999, so the vocabulary \(--vocab-s"
    with pytest.raises(DataError, match=message):
        largest_token(path, tokens, 2000)
    assert largest_token(path, tokens, 3001) == 3000
    assert largest_token(path, tokens[:4000], 1) == 0
    with pytest.raises(DataError, match=r"'a.npy': token 2 is -1; tokens are 0 to 9"):
        largest_token(path, np.array([1, 2, -1, 3]), 10)
