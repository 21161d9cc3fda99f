"""Whether tensors that go together have sizes that do: what the kernels rely on, and never look at."""

from collections.abc import Callable, Container, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from samo.kernels import AdamWUpdate
from samo.mask.mask import Mask

__all__ = []

T = TypeVar("T")


def check_pair(values: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Raise ValueError unless ``values`` has the kept entries of ``dense``."""
    numel = dense.numel()
    if mask is None:
        if values.numel() != numel:
            raise ValueError(f"{values.numel():,} values do not fill a tensor of {numel:,} entries")
    elif numel != mask.numel or values.numel() != mask.kept:
        raise ValueError(
            f"a mask that keeps {mask.kept:,} of {mask.numel:,} entries does not fit {values.numel():,} "
            f"values and a dense tensor of {numel:,}"
        )


def check_update(update: AdamWUpdate, **others: tuple[Tensor, int]) -> None:
    """Raise ValueError with the names of what does not fit; ``others`` come with their right sizes."""
    kept = update.param.numel()
    found = {
        "grad": (update.grad.numel(), kept),
        "exp_avg": (update.exp_avg.numel(), kept),
        "exp_avg_sq": (update.exp_avg_sq.numel(), kept),
        "step": (update.step.numel(), 1),
    }
    if update.rest is not None:
        found["rest"] = update.rest.numel(), kept
    if update.mask is not None:
        found["mask"] = update.mask.kept, kept
    if update.dense is not None:
        found["dense"] = (
            update.dense.numel(),
            kept if update.mask is None else update.mask.numel,
        )
    found |= {name: (tensor.numel(), size) for name, (tensor, size) in others.items()}
    wrong = [
        f"{name} ({has:,}, not {size:,})" for name, (has, size) in found.items() if has != size
    ]
    if wrong:
        raise ValueError(
            f"a parameter of {kept:,} entries has the wrong size of {', '.join(wrong)}"
        )


def has_plain_tensors(update: AdamWUpdate, types: Container[torch.dtype]) -> bool:
    """Return whether addresses and sizes say all about an update's tensors, in types that are known.

    Moments and rest may have any type.
    """
    param, rest, grad, exp_avg, exp_avg_sq, step, _, _, dense, mask = update
    kept, device = param.numel(), param.device
    return (
        param.dtype in types
        and grad.dtype in types
        and step.dtype == torch.float32
        and step.numel() == 1
        and step.device == device
        and param.is_contiguous()
        and is_vector(grad, kept, device)
        and is_vector(exp_avg, kept, device)
        and is_vector(exp_avg_sq, kept, device)
        and (rest is None or is_vector(rest, kept, device))
        and (mask is None or (mask.kept == kept and mask.words.device == device))
        and (
            dense is None
            or (
                dense.dtype in types
                and is_vector(dense, kept if mask is None else mask.numel, device)
            )
        )
    )


def is_vector(tensor: Tensor, size: int, device: torch.device) -> bool:
    """Return whether an address says all about a tensor of so many entries."""
    return tensor.numel() == size and tensor.is_contiguous() and tensor.device == device


def set_apart(updates: Iterable[T], is_plain: Callable[[T], bool]) -> tuple[list[T], list[T]]:
    """Return the updates that a fast path takes, and those that it leaves to the reference."""
    plain: list[T] = []
    others: list[T] = []
    for update in updates:
        (plain if is_plain(update) else others).append(update)
    return plain, others


def mask_of_copy(update: AdamWUpdate) -> Mask | None:
    """Return where values lie in a dense copy; None where there is none, or where it has all entries."""
    return None if update.dense is None else update.mask
