"""Channels of BatchNorm layers: their scores, and which weights belong to a channel.

A BatchNorm scales each channel by gamma, so a channel with a small gamma matters little. Masks of
channels are drawn as Early-Bird tickets do (You et al. 2020), over all layers at once:

    scores     |gamma| of all n channels of the network, in one vector
    threshold  the score at place int(n * sparsity) in ascending order
    kept       channels whose score is larger; those that equal the threshold are pruned

`channel_masks` draws them, `weight_masks` turns them into masks of parameters.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from samo.errors import MaskError
from samo.mask import Mask
from samo.model_masks import Masks

__all__ = []

BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TRANSPOSED: Final = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, slots=True)
class Channels:
    """The layers that share the channels of one BatchNorm, by the names of their modules."""

    norm: str
    producer: str
    """The layer whose outputs the BatchNorm normalises."""
    consumers: tuple[str, ...]
    """The layers that read nothing but these channels: a channel that is 0 makes their inputs 0."""


def batch_norms(model: nn.Module, skipped: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return the BatchNorm layers with scales, less those whose scale is in ``skipped``.

    Raises:
        ValueError: There is none.
    """
    found: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BATCH_NORMS)
        and module.weight is not None
        and _weight_of(name) not in skipped
    }
    if not found:
        raise ValueError(
            "score='batchnorm' ranks channels by the scales of BatchNorm layers, and the model has none "
            "(or skip= names them all); use score='magnitude', which needs no BatchNorm"
        )
    return found


def channel_masks(norms: Mapping[str, nn.Module], sparsity: float) -> Masks:
    """Draw the masks of all channels, named by the scales: one threshold, and only larger scores kept.

    Raises:
        ValueError: A scale is NaN or infinite, or has no values.
    """
    scores: dict[str, Tensor] = {}
    for name, module in norms.items():
        if _scale(module).is_meta:
            raise ValueError(
                f"'{_weight_of(name)}' has no values (device 'meta') to compare; load the weights first"
            )
        scores[name] = _scale(module).detach().abs().float()
        bad = int((~scores[name].isfinite()).sum())
        if bad:
            raise ValueError(
                f"{bad:,} of the {scores[name].numel():,} scales of '{_weight_of(name)}' are NaN or "
                "infinite and cannot be compared; repair the checkpoint, or leave the layer out with "
                f"skip=['{_weight_of(name)}']"
            )
    together = torch.cat([score.cpu() for score in scores.values()])
    threshold = together.sort().values[int(together.numel() * sparsity)].item()
    return Masks(
        {_weight_of(name): Mask.from_bool(score > threshold) for name, score in scores.items()}
    )


def weight_masks(
    model: nn.Module,
    channels: Collection[Channels],
    drawn: Masks,
    skipped: Collection[str] = (),
) -> Masks:
    """Return masks of parameters that prune the channels which ``drawn`` prunes.

    For each BatchNorm: its scale and shift, outputs and bias of the layer before it, and the inputs of
    the layers after it. Scale and shift of a pruned channel are 0, so the channel is 0 for good: the
    masked network computes what it would compute without the channel.

    Args:
        model: The model that ``channels`` was found in.
        channels: What belongs to which BatchNorm.
        drawn: Masks of channels, as from `channel_masks`.
        skipped: Parameters that get no mask.

    Raises:
        MaskError: A layer would lose all of its channels, or the scales of all channels are equal.
    """
    marks: dict[str, list[tuple[int, Tensor]]] = {}

    def mark(module: str, parameter: str, dim: int, kept: Tensor) -> None:
        values = getattr(model.get_submodule(module), parameter)
        name = f"{module}.{parameter}" if module else parameter
        if values is not None and name not in skipped:
            marks.setdefault(name, []).append((dim, kept))

    for entry in channels:
        mask = drawn[_weight_of(entry.norm)]
        if mask.kept == 0:
            _check_trained(model, channels)
            raise MaskError(
                f"'{entry.norm}' would lose all of its {mask.numel:,} channels, and nothing could pass; "
                f"choose a lower sparsity, or leave it out with skip=['{_weight_of(entry.norm)}']"
            )
        kept = mask.to_bool()
        mark(entry.norm, "weight", 0, kept)
        mark(entry.norm, "bias", 0, kept)
        mark(entry.producer, "weight", output_dim(model.get_submodule(entry.producer)), kept)
        mark(entry.producer, "bias", 0, kept)
        for consumer in entry.consumers:
            mark(consumer, "weight", 1 - output_dim(model.get_submodule(consumer)), kept)
    return Masks(
        {
            name: _mask_of(values, marks[name])
            for name, values in model.named_parameters()
            if name in marks
        }
    )


def _check_trained(model: nn.Module, channels: Collection[Channels]) -> None:
    """Refuse scales that are all the same: no sparsity would keep some of them and prune others."""
    norms = [model.get_submodule(entry.norm) for entry in channels]
    scores = torch.cat([_scale(norm).detach().abs().cpu() for norm in norms])
    if scores.min() == scores.max():
        raise MaskError(
            f"the scales of all {scores.numel():,} channels are equal ({scores[0].item():g}), as they are "
            "before training, so none is worth more than another at any sparsity; train the model "
            "first"
        )


def _mask_of(values: Tensor, marks: Collection[tuple[int, Tensor]]) -> Mask:
    """Return the mask of one tensor from what is kept of some of its dimensions."""
    keep = torch.ones_like(values, dtype=torch.bool)
    for dim, kept in marks:
        # A flattened channel is as many neighbouring inputs as it had places.
        kept = kept.to(values.device).repeat_interleave(values.shape[dim] // kept.numel())
        keep &= kept.view([-1 if at == dim else 1 for at in range(values.dim())])
    return Mask.from_bool(keep)


def add_l1_(norms: Mapping[str, nn.Module], strength: float) -> None:
    """Add ``strength * sign(gamma)`` to the gradient of every scale that is trained.

    Raises:
        RuntimeError: A scale has no gradient.
    """
    trained = {name: _scale(m) for name, m in norms.items() if _scale(m).requires_grad}
    missing = [name for name, scale in trained.items() if scale.grad is None]
    if missing:
        raise RuntimeError(
            f"'{_weight_of(missing[0])}' has no gradient to add to ({len(missing)} of {len(trained)} "
            "scales); call add_l1_ after backward() and before the optimizer's step()"
        )
    for scale in trained.values():
        assert scale.grad is not None
        scale.grad.add_(scale.detach().sign(), alpha=strength)


def output_dim(module: nn.Module) -> int:
    """Return which dimension of a layer's weight runs over its outputs; 1 minus it are the inputs."""
    return 1 if isinstance(module, TRANSPOSED) else 0


def _weight_of(name: str) -> str:
    return f"{name}.weight" if name else "weight"


def _scale(module: nn.Module) -> nn.Parameter:
    scale = module.weight
    assert isinstance(scale, nn.Parameter)
    return scale
