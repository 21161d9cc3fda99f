"""Training text: data files, tokenizers, token streams, and batches of them."""
