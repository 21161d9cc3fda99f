"""Training text: files and tokenizers, the tokens in them, and the batches drawn from those."""

__all__ = []
