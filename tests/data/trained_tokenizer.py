"""A small byte-level BPE tokenizer, trained on the spot, for the tests of the data."""

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT: Final = (
    "To be, or not to be:\n    that is the question.\n\n"
    "Whether 'tis nobler \u00e9\u20ac\U0001f642\n"
)
VOCAB_SIZE: Final = 300


def save_trained_tokenizer(folder: Path) -> Path:
    """Train a tokenizer and save it as transformers does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
