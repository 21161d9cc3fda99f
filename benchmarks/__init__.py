"""Benchmarks: one folder a question."""
