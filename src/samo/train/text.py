"""The text of a run: what it learns, and what it is validated on."""

from pathlib import Path
from typing import NamedTuple

from samo.data.batches import validation_batches
from samo.data.tokenizers import Tokenizer, open_tokenizer
from samo.data.tokens import Tokens, open_tokens
from samo.errors import DataError
from samo.train.config import TrainConfig

__all__ = []


class Text(NamedTuple):
    """The data of a run."""

    tokenizer: Tokenizer
    train: Tokens
    valid: Tokens
    vocab_size: int

    def fingerprint(self) -> str:
        """Return what tells this text from another."""
        return f"{self.train.fingerprint()}-{self.valid.fingerprint()}"


def open_text(config: TrainConfig, out: Path) -> Text:
    """Open what a run reads, and check that it is enough.

    Raises:
        DataError: It cannot be used.
    """
    data, context = config.data, config.model.context
    assert isinstance(context, int)
    tokenizer = open_tokenizer(str(data.tokenizer))
    size = None if data.vocab_size == "auto" else data.vocab_size
    tokens = open_tokens(data.train, tokenizer=tokenizer, cache=out / "data", vocab_size=size)
    if data.valid:
        valid = open_tokens(data.valid, tokenizer=tokenizer, cache=out / "data", vocab_size=size)
        together = max(tokens.vocab_size, valid.vocab_size)
    else:
        together = tokens.vocab_size
        tokens, valid = tokens.split(data.valid_fraction, min_tokens=context + 1)
    for name, part, paths in (
        ("to train on", tokens, data.train),
        ("to validate on", valid, data.valid or data.train),
    ):
        try:
            size = config.run.batch_size
            next(validation_batches(part, context=context, batch_size=size, max_batches=1))
        except DataError as error:
            files = ", ".join(f"'{path.name}'" for path in paths)
            raise DataError(f"the text {name} ({files}): {error}") from None
    return Text(tokenizer, tokens, valid, together)
