"""Data-parallel training on a few ranks of one machine."""
