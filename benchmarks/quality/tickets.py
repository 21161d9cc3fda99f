"""The original Early-Bird tickets (You et al. 2020): channels, by the scales of their BatchNorm.

A BatchNorm scales each channel by gamma, so a channel with a small gamma matters little. Masks of
channels are taken over all layers at once:

    scores     |gamma| of all n channels of the network, in one vector
    threshold  the score at place int(n * sparsity) in ascending order
    kept       channels whose score is larger; those that equal the threshold are pruned

and drawn when five in a row agree, by the share of all channels in which they differ. A ticket is
masks of parameters. A pruned channel takes along

    conv -> BatchNorm -> ReLU, pooling, flattening -> conv or linear layer
    outputs  scale, shift                             inputs

so it is exactly 0 behind its BatchNorm, and the masked network computes what the network without
the channel would compute, in training too. About 1 - (1 - sparsity)^2 of the weights between two
layers go.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from samo.errors import MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.pruning.early_bird import Settling

__all__ = ["ChannelTickets", "Channels", "find_channels"]

QUEUE, THRESHOLD = 5, 0.1

_LAYERS: Final = (nn.Conv2d, nn.Linear)
_PASSING: Final = (nn.ReLU, nn.MaxPool2d, nn.Flatten)
"""What keeps channels apart and makes 0 of 0."""


@dataclass(frozen=True, slots=True)
class Channels:
    """The layers that share the channels of one BatchNorm, by their names."""

    norm: str
    producer: str
    """The layer whose outputs the BatchNorm normalises."""
    consumer: str | None
    """The layer that reads what the BatchNorm gives; the network may end before there is one."""


class ChannelTickets:
    """Watches a chain of layers in training, and draws a ticket of channels once masks have settled.

    Args:
        model: Layers in the order of their use.
        sparsity: Fraction of the channels to prune: more than 0 and less than 1.
        spared: Names of BatchNorms that keep all of their channels.

    Raises:
        ValueError: The model is no chain that can be followed.
    """

    def __init__(
        self, model: nn.Sequential, sparsity: float, *, spared: Collection[str] = ()
    ) -> None:
        self.model: Final = model
        self.sparsity: Final = sparsity
        self.channels: Final = [c for c in find_channels(model) if c.norm not in spared]
        self._settling: Final = Settling(QUEUE, THRESHOLD, "hamming")

    def observe(self) -> Masks | None:
        """Look at the scales, and return the masks of parameters if those of channels have settled.

        Raises:
            ValueError: A scale is NaN or infinite.
            MaskError: Masks have settled, and a layer would lose all of its channels.
        """
        masks = self.channel_masks()
        return self.weight_masks(masks) if self._settling.add(masks) else None

    def draw_now(self) -> Masks:
        """Return the masks of parameters for the scales as they are, settled or not."""
        return self.weight_masks(self.channel_masks())

    @property
    def distances(self) -> list[list[float]]:
        """For each observation its distances to those before it in the queue, oldest first."""
        return self._settling.rows

    @property
    def reason(self) -> str:
        """Why the ticket was drawn, or why not."""
        return self._settling.reason

    def channel_masks(self) -> Masks:
        """Return which channels would be kept now, under the names of the scales."""
        scores: dict[str, Tensor] = {}
        for entry in self.channels:
            name = f"{entry.norm}.weight"
            scores[name] = self.model.get_parameter(name).detach().abs().float()
            bad = int((~scores[name].isfinite()).sum())
            if bad:
                raise ValueError(
                    f"{bad:,} of the {scores[name].numel():,} scales of '{name}' are NaN or infinite and "
                    "cannot be compared; choose a smaller learning rate"
                )
        together = torch.cat(list(scores.values()))
        threshold = together.sort().values[int(together.numel() * self.sparsity)]
        return Masks({name: Mask.from_bool(score > threshold) for name, score in scores.items()})

    def weight_masks(self, drawn: Masks) -> Masks:
        """Return masks of parameters that prune the channels which ``drawn`` prunes.

        Raises:
            MaskError: A layer would lose all of its channels.
        """
        parameters = dict(self.model.named_parameters())
        keep: dict[str, Tensor] = {}

        def keep_only(name: str, dim: int, kept: Tensor) -> None:
            if name not in parameters:  # a layer without bias
                return
            values = parameters[name]
            # A flattened channel is as many neighbouring inputs as it had places.
            kept = kept.repeat_interleave(values.shape[dim] // kept.numel())
            whole = keep.setdefault(name, torch.ones_like(values, dtype=torch.bool))
            whole &= kept.view([-1 if at == dim else 1 for at in range(values.dim())])

        for entry in self.channels:
            mask = drawn[f"{entry.norm}.weight"]
            if mask.kept == 0:
                raise MaskError(
                    f"'{entry.norm}' would lose all of its {mask.numel:,} channels, and nothing could "
                    "pass; choose a lower sparsity, or spare it"
                )
            kept = mask.to_bool()
            for layer in (entry.norm, entry.producer):
                keep_only(f"{layer}.weight", 0, kept)
                keep_only(f"{layer}.bias", 0, kept)
            if entry.consumer is not None:
                keep_only(f"{entry.consumer}.weight", 1, kept)
        return Masks({name: Mask.from_bool(keep[name]) for name in parameters if name in keep})


def find_channels(model: nn.Sequential) -> list[Channels]:
    """Return what belongs to each BatchNorm of a chain of layers.

    Raises:
        ValueError: There is no BatchNorm, one does not directly follow a convolution, or there is a
            layer of another kind.
    """
    layers = list(model.named_children())
    if len(layers) < len(model):
        raise ValueError(
            "a layer is used twice, and its channels are followed where it is used once"
        )
    found: list[Channels] = []
    for place, (name, module) in enumerate(layers):
        if isinstance(module, nn.BatchNorm2d):
            before, producer = layers[place - 1] if place else ("nothing", None)
            if not isinstance(producer, nn.Conv2d):
                raise ValueError(
                    f"BatchNorm '{name}' follows '{before}', which is no convolution whose outputs could "
                    "be pruned"
                )
            after = (n for n, layer in layers[place:] if isinstance(layer, _LAYERS))
            found.append(Channels(name, before, next(after, None)))
        elif not isinstance(module, (*_LAYERS, *_PASSING)) or getattr(module, "groups", 1) != 1:
            raise ValueError(
                f"'{name}' ({type(module).__name__}) is no layer through which channels are followed"
            )
    if not found:
        raise ValueError("the model has no BatchNorm by whose scales channels could be ranked")
    return found
