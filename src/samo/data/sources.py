"""Open the data of a run, whatever its kind: one continuous stream of text, or examples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samo.data.examples import Examples, ExampleTokenizer, open_examples
from samo.data.rows import is_example_file
from samo.data.tokens import Tokens, open_tokens
from samo.errors import DataError

Data = Tokens | Examples
"""What `samo.data.batches` makes batches of."""


def open_data(
    train: Sequence[Path],
    valid: Sequence[Path],
    *,
    valid_fraction: float,
    tokenizer: ExampleTokenizer,
    context: int,
    cache: Path,
    vocab_size: int,
    is_packed: bool = True,
) -> tuple[Data, Data]:
    """Open the data to train on and to validate on, which is held back if no files are named.

    Files of both are of one kind: see `open_files`.
    """
    _have_examples([*train, *valid])
    how: Any = {"tokenizer": tokenizer, "context": context, "cache": cache}
    how |= {"vocab_size": vocab_size, "is_packed": is_packed}
    data = open_files(train, **how)
    if valid:
        return data, open_files(valid, **how)
    if isinstance(data, Tokens):
        return data.split(valid_fraction, min_tokens=context + 1)
    return data.split(valid_fraction)


def open_files(
    paths: Sequence[Path],
    *,
    tokenizer: ExampleTokenizer,
    context: int,
    cache: Path,
    vocab_size: int,
    is_packed: bool = True,
) -> Data:
    """Open files that are either text and tokens, or examples.

    See `open_tokens` and `open_examples`.
    """
    known: Any = {"tokenizer": tokenizer, "cache": cache, "vocab_size": vocab_size}
    if _have_examples(paths):
        return open_examples(paths, **known, context=context, is_packed=is_packed)
    return open_tokens(paths, **known)


def _have_examples(paths: Sequence[Path]) -> bool:
    """Return whether files have examples; raise DataError if only some have."""
    examples = [path for path in paths if is_example_file(path)]
    if examples and len(examples) < len(paths):
        other = next(path for path in paths if path not in examples)
        raise DataError(
            f"'{other}' is text and '{examples[0]}' has examples; name files of one kind. To mix "
            'them, write the text as examples: {"text": "..."}, one a line, in a .jsonl file'
        )
    return bool(examples)
