"""Early-Bird tickets: watch a dense model in training, and draw its masks once they have settled.

settling   the queue of masks, their distances, and the rule of the draw
settings   which settings go together
saved      what a resumed run needs
bird       `EarlyBird`
"""

__all__ = []
