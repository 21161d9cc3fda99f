"""Models that are pruned already: to prune them less would keep zeros, and which is arbitrary."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from samo.pruning.scope import Group


class KeptZerosWarning(UserWarning):
    """More weights would be kept than are nonzero: ``found`` says where, ``sparsity`` what fits."""

    def __init__(self, found: str, sparsity: float) -> None:
        super().__init__(
            f"{found}, so zeros are kept at random; samo.Masks.from_zeros(model) returns the masks "
            f"of a pruned model, and a sparsity above {sparsity:.3f} prunes it further"
        )
        self.found = found
        self.sparsity = sparsity


def warn_of_zeros(
    groups: Sequence[Group], nonzero: Mapping[str, int], parameters: Mapping[str, Tensor]
) -> None:
    """Warn once, to the caller of `samo.prune`, if groups keep more weights than are nonzero."""
    lacking = [
        (group, found)
        for group in groups
        if 0 < (found := sum(nonzero[name] for name in group.names)) < group.kept
    ]  # a tensor that is all 0 was not pruned: it has yet to be trained
    if not lacking:
        return
    kept = sum(group.kept for group, _ in lacking)
    found = sum(found for _, found in lacking)
    names = [name for group, _ in lacking for name in group.names]
    others = f" and {len(names) - 1:,} others have" if len(names) > 1 else " has"
    numel = sum(parameters[name].numel() for name in names)
    what = f"'{names[0]}'{others} only {found:,} nonzero weights, and {kept:,} would be kept"
    warnings.warn(
        KeptZerosWarning(f"{what}: the model is pruned already", 1 - found / numel), stacklevel=3
    )


@contextmanager
def refuse_zeros(otherwise: str) -> Iterator[None]:
    """Turn that warning into a ValueError with flags."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", KeptZerosWarning)
        try:
            yield
        except KeptZerosWarning as warning:
            raise ValueError(
                f"{warning.found}; {otherwise}, or raise --sparsity above {warning.sparsity:.3f}"
            ) from None
