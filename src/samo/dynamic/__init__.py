"""Masks that change while a model trains: when, which entries, and the remap that follows.

schedules   when masks change and by how much, and what a resumed run needs
choices     which entries to drop and to grow     magnitudes, scores and a seed in, masks out
members     the weights whose masks change, and masks that must not
growth      the best entries to grow, found while a weight's dense gradient is there
rates       the learning rate after a change
gradual     `GradualPruning`: drop only
sparse      `DynamicSparse`: drop and grow as many
"""

__all__ = []
