"""Rows of parquet files, and of folders that Hugging Face's ``Dataset.save_to_disk`` wrote.

Both need pyarrow, and a folder needs no package ``datasets``: it is a list of files in Arrow's
format. They may come from strangers: of a folder, only files in it are read, and no links.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from samo.errors import DataError, first_words
from samo.utils import untrusted

_STATE: Final = "state.json"
_MAX_STATE_BYTES: Final = 2**24
_ROWS_AT_ONCE: Final = 64


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a parquet file, numbered from 1; of its columns these, or else all."""
    _check_arrow(path)
    from pyarrow.parquet import ParquetFile

    with _naming(path), ParquetFile(path) as file:
        chosen = [name for name in file.schema_arrow.names if name in columns] or None
        batches = file.iter_batches(_ROWS_AT_ONCE, columns=chosen)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)


def check_folder(path: Path) -> None:
    """Raise DataError unless ``save_to_disk`` of a ``Dataset`` wrote the folder."""
    if (path / "dataset_dict.json").is_file():
        parts = sorted(each.parent.name for each in path.glob(f"*/{_STATE}")) or ["train"]
        raise DataError(
            f"data folder '{path}' has the parts {', '.join(parts)}; name one: {path / parts[0]}"
        )
    if not (path / _STATE).is_file():
        raise DataError(
            f"data folder '{path}' has no {_STATE}; pass files, such as {path}/*.jsonl, or a "
            "folder written by datasets.Dataset.save_to_disk"
        )


def folder_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a folder as `parquet_rows` does."""
    _check_arrow(path)
    try:
        state = untrusted.parse_json(untrusted.read_file(path / _STATE, _MAX_STATE_BYTES))
        names = [each["filename"] for each in state["_data_files"]]
        for name in names:
            if not isinstance(name, str) or name != os.path.basename(name):
                raise ValueError(f"{str(name)[:80]!r} is not the name of a file")
            untrusted.check_file(path / name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"data folder '{path}': its {_STATE} cannot be used ({error}); save the dataset again"
        ) from None
    yield from enumerate((row for name in names for row in _stream_rows(path / name, columns)), 1)


def _stream_rows(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow

    with _naming(path), pyarrow.memory_map(str(path)) as file:
        for batch in pyarrow.ipc.open_stream(file):
            batch.validate(full=True)  # or a damaged file could make it read beyond the end
            chosen = [name for name in batch.schema.names if name in columns]
            batch = batch.select(chosen) if chosen else batch
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield from batch.slice(start, _ROWS_AT_ONCE).to_pylist()


def _check_arrow(path: Path) -> None:
    """Raise DataError if pyarrow is missing, or so old that it unpickles what files name."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"data file '{path}' needs the package pyarrow: pip install pyarrow"
        ) from None
    if int(pyarrow.__version__.partition(".")[0]) < 15:
        raise DataError(
            f"data file '{path}' needs pyarrow 15 or newer, and this is {pyarrow.__version__}: "
            "pip install --upgrade pyarrow"
        )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, NotImplementedError, MemoryError) as error:
        raise DataError(f"data file '{path}' cannot be read: {first_words(error)}") from None
