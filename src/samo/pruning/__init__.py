"""Choose the weights to keep.

densities       how many of each tensor: n of every m, or by its shape (ERK)
selection       the largest of many entries, equals told apart by a hash
neighbours      the largest n of every m neighbours
choosing        `prune`
"""

__all__ = []
