"""The ledger: the account of every byte a run holds, predicted and measured under the same names."""

__all__ = []
