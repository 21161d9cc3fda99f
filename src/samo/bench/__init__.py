"""Measurements behind ``samo bench``: one module for each question, and what they share.

kernels            what do compress, expand and the update cost, beside the bytes they must move?
step               what does a training step cost, beside what people would use instead?

``timing`` has the clock, ``rows`` what is written down, ``figures`` what is drawn.
"""

__all__ = []
