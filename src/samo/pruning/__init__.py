"""Everything that makes masks.

prune          by magnitude or at random; `topk`, `nm` and `densities` do the counting
early_bird     once the mask of a dense model in training stabilizes
schedules      while a compressed model trains: gradual pruning, SET, RigL
growth         which entries those drop and grow
"""

__all__ = []
