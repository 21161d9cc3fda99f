"""Everything that makes masks.

prune          by magnitude or at random
scope          which tensors are compared: each, all, or by ERK; n:m `pattern`
topk, nm       the largest of them, the n largest of every m
early_bird     once the mask of a dense model in training stabilizes
schedules      while a compressed model trains: gradual pruning, SET, RigL
growth         which entries those drop and grow
"""

__all__ = []
