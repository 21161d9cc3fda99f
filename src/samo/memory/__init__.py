"""The ledger: the bytes of model state, predicted and measured under the same names."""
