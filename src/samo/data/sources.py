"""Open the data of a run, whatever its kind: a text to read on and on, or examples."""

from collections.abc import Sequence
from pathlib import Path

from samo.data.examples import Examples, ExampleTokenizer, open_examples
from samo.data.rows import is_example_file
from samo.data.tokens import Tokens, open_tokens
from samo.errors import DataError

__all__ = ["Data", "open_data"]

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

    Args:
        train: Text and token files, or files and folders of examples.
        valid: Files of the same kind, or none.
        valid_fraction: How much of the data to hold back.
        tokenizer: The tokenizer of the model.
        context: Tokens that the model reads at once.
        cache: A folder for encoded files.
        vocab_size: Tokens that the model knows.
        is_packed: Whether a row of a batch may have several examples.
    """
    paths = [*train, *valid]
    examples = [path for path in paths if is_example_file(path)]
    if not examples:
        opened = [
            open_tokens(part, tokenizer=tokenizer, cache=cache, vocab_size=vocab_size)
            for part in (train, valid)
            if part
        ]
        if valid:
            return opened[0], opened[1]
        return opened[0].split(valid_fraction, min_tokens=context + 1)
    if len(examples) < len(paths):
        other = next(path for path in paths if path not in examples)
        raise DataError(
            f"'{other}' is text and '{examples[0]}' has examples; name files of one kind. To mix "
            'them, write the text as examples: {"text": "..."}, one a line, in a .jsonl file'
        )
    both = [
        open_examples(
            part,
            tokenizer=tokenizer,
            context=context,
            cache=cache,
            vocab_size=vocab_size,
            is_packed=is_packed,
        )
        for part in (train, valid)
        if part
    ]
    return (both[0], both[1]) if valid else both[0].split(valid_fraction)
