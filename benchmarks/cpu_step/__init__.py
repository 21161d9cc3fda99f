"""A training step on a CPU, beside dense training and peers."""
