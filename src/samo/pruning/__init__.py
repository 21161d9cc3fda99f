"""Everything that makes masks.

prune          by magnitude or at random; `topk`, `nm` and `densities` do the counting
early_bird     once the mask of a dense model in training stabilizes
gradual        raise the sparsity over time
dynamic        drop and regrow weights; `growth` chooses which
schedules      when, and what the two have in common
"""

__all__ = []
