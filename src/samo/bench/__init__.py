"""Measurements behind ``samo bench``: one module for each question, and what they share.

kernels            what do compress, expand and the update cost, beside the bytes they must move?
step               what does a training step cost, beside what people would use instead?
sparse_vs_dense    are sparse matrix products slower than dense ones at this sparsity?

``timing`` has the clock, ``rows`` what is written down, ``figures`` what is drawn.
"""

__all__ = []
