"""Early-Bird tickets: watch a dense model in training, and draw its masks once they have settled.

settling        the queue of masks, their distances, and the rule of the draw
channels        scores of BatchNorm channels, and their masks carried to the weights
channel_graph   which convolution feeds which BatchNorm
inputs          whether a BatchNorm after a linear layer normalises its outputs
settings        which settings go together
saved           what a resumed run needs
bird            `EarlyBird`
"""

__all__ = []
