"""Whether tensors that go together have sizes that do: what the kernels rely on, and never look at."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor

from samo.kernels import AdamWUpdate
from samo.mask import Mask

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
