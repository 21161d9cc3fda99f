"""Plain torch operations: correct on every device, and what the fast paths are compared with.

AdamW divides its moments, which start at 0, by the share of a full average they can have seen:
1 - beta**t after t updates. An entry that is newly kept at step 1,000 has seen one gradient, not
1,000:

    moments after one gradient g     m = 0.1 g    v = 0.001 g^2          (betas 0.9, 0.999)
    corrected for t = 1              m / 0.1 = g, v / 0.001 = g^2        change lr * 1.0
    corrected for t = 1,000          m / 1 = 0.1 g, v / 0.63 = 0.0016 g^2    change lr * 2.5

and 3.16 for large t. So entries may have ages, the number of updates each has had, in 16 bits, and
corrections come from a table. An age stops at `OLDEST` and the weight's step count replaces it, so
entries that were always kept are corrected as without ages, bit for bit, at any step.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from samo.kernels import lean
from samo.kernels.checks import check_pair
from samo.kernels.protocol import AdamWSettings, AdamWUpdate
from samo.kernels.rounding import join, split, to_correction
from samo.mask import bitmap
from samo.mask.mask import Mask

OLDEST: Final = 2**15 - 1
"""The largest age: this many updates or more."""

_WRITTEN: Final = ("param", "remainder", "exp_avg", "exp_avg_sq")


def compress_(dense: Tensor, mask: Mask | None, out: Tensor) -> None:
    """Write the kept entries of ``dense`` to ``out``: `Kernels.compress_`."""
    check_pair(out, mask, dense)
    if mask is None:
        out.detach().copy_(dense.detach().reshape(out.shape))
        return
    flat_N, flat_Z = _flat(dense), _flat(out)
    for piece_N, keep, piece_Z in mask.pieces():
        flat_Z[piece_Z] = flat_N[piece_N][keep]
    _write_back(flat_Z, out)


def expand_(values: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Write ``values`` to the kept entries of ``dense`` and 0 elsewhere: `Kernels.expand_`."""
    check_pair(values, mask, dense)
    _expand(values, mask, dense, None)


def _expand(values: Tensor, mask: Mask | None, dense: Tensor, skip: Tensor | None) -> None:
    if mask is None:
        put(dense.detach(), values.detach().reshape(dense.shape), skip)
        return
    flat_Z, flat_N = _flat(values), _flat(dense)
    for piece_N, keep, piece_Z in mask.pieces():
        new = torch.zeros_like(flat_N[piece_N])
        new[keep] = flat_Z[piece_Z].to(dense.dtype)
        put(flat_N[piece_N], new, skip)
    _write_back(flat_N, dense)


def put(target: Tensor, source: Tensor, skip: Tensor | None) -> None:
    """Copy to ``target`` in place, unless ``skip`` is true."""
    target.copy_(source if skip is None else torch.where(skip, target, source))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)  # a view, or a copy if its strides allow none


def _write_back(flat: Tensor, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def find_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether any entry is NaN or infinite: `Kernels.find_nonfinite`."""
    # The largest magnitude is NaN or infinite exactly if an entry is; a sum could overflow.
    norms = torch._foreach_norm([tensor for tensor in tensors if tensor.numel()], float("inf"))
    if not norms:
        return torch.zeros((), dtype=torch.bool, device=tensors[0].device if tensors else None)
    return ~torch.stack([norm.isfinite() for norm in norms]).all()


@torch.no_grad()
def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step, with the operations of torch's unfused one in the same order."""
    for update in updates:
        corrections = count_step(update, settings, skip)
        written = {name: getattr(update, name) for name in _WRITTEN}
        flats: dict[str, Any] = {
            name: _flat(tensor) for name, tensor in written.items() if tensor is not None
        }
        flat = update._replace(grad=_flat(update.grad), **flats)
        _update(flat, settings, skip, corrections)
        for name, vector in flats.items():
            _write_back(vector, written[name])
        if update.dense is not None:
            _expand(update.param, update.mask, update.dense, skip)


# Corrections of bias -----------------------------------------------------------------------------


class Corrections(NamedTuple):
    """Factors of an AdamW step: of a parameter, or with ages of each entry."""

    step_size: float | Tensor  # learning rate over the first moment's bias correction
    denominator: float | Tensor  # square root of the second moment's bias correction
    decay: float | Tensor  # 1 - learning rate * weight decay


def count_step(update: AdamWUpdate, settings: AdamWSettings, skip: Tensor | None) -> Corrections:
    """Count a step of a parameter unless it is skipped, and return its corrections.

    In double precision, on the host or with ``skip`` on the device. If the learning rate is a
    tensor, step size and decay are in its type, as torch's are.
    """
    beta1, beta2, _ = settings
    lr = update.lr
    update.step.add_(1 if skip is None else ~skip)
    count: float | Tensor = update.step.item() if skip is None else update.step.double()
    first = 1 - beta1**count
    if isinstance(lr, Tensor) and isinstance(first, Tensor):
        first = first.to(lr.dtype)
    return Corrections(lr / first, (1 - beta2**count) ** 0.5, 1 - lr * update.weight_decay)


def ages_at(step: Tensor, size: int) -> Tensor:
    """Return the ages of ``size`` entries that have been kept since the first step."""
    return step.clamp(max=OLDEST).to(torch.int16).expand(size).clone()


def corrections_by_age(update: AdamWUpdate, settings: AdamWSettings) -> Tensor:
    """Return step sizes and denominators for each age, in the type of the moments."""
    like, lr = update.exp_avg, update.lr
    first, second = bias_corrections(settings.beta1, settings.beta2, like.device)
    if not isinstance(lr, Tensor):
        lr = torch.full((), lr, dtype=torch.float64, device=like.device)
    # Tensor over tensor: torch computes a number over a tensor as number * (1 / tensor).
    step_sizes = lr.to(like.device) / first.to(lr.dtype)
    return torch.stack([step_sizes.to(like.dtype), second.to(like.dtype)])


@lru_cache(maxsize=8)
def bias_corrections(beta1: float, beta2: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the corrections of both moments for each age: the same doubles as `count_step`'s."""
    # In Python, since the last digit of torch's power function may differ.
    ages = range(1, OLDEST + 1)
    first = [1.0, *(1 - beta1**age for age in ages)]  # age 0, before any update, is never looked up
    second = [1.0, *((1 - beta2**age) ** 0.5 for age in ages)]
    made = torch.tensor([first, second], dtype=torch.float64, device=device)
    return made[0], made[1]


def _look_up(ages: Tensor, by_age: Tensor, whole: Corrections) -> Corrections:
    ages = ages.to(torch.int32)
    step_sizes, denominators = (
        torch.where(ages == OLDEST, of_all, row.index_select(0, ages))
        for of_all, row in zip(whole, by_age)
    )
    return Corrections(step_sizes, denominators, whole.decay)


# The update --------------------------------------------------------------------------------------


def adamw_values(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    corrections: Corrections,
    settings: AdamWSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new values and moments, as new tensors."""
    step_size, correction, decay = corrections
    beta1, beta2, eps = settings
    exp_avg = exp_avg.lerp(grad, 1 - beta1)
    exp_avg_sq = exp_avg_sq.mul(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / correction).add_(eps)
    # Not addcdiv_, whose value cannot be a tensor; it rounds the same.
    change = (exp_avg * -step_size) / denominator
    return param.mul(decay).add_(change), exp_avg, exp_avg_sq


def _update(
    flat: AdamWUpdate, settings: AdamWSettings, skip: Tensor | None, corrections: Corrections
) -> None:
    """Update vectors in place, piece by piece."""
    if flat.age is not None:
        ages = flat.age.clamp(0, OLDEST - 1).add_(1)  # always an index of the table
        put(flat.age, ages, skip)
        by_age = corrections_by_age(flat, settings)
    for piece_Z, groups, piece_G in _pieces(flat):
        param = flat.param[piece_Z]
        remainder = None if flat.remainder is None else flat.remainder[piece_Z]
        moments = flat.exp_avg[piece_Z], flat.exp_avg_sq[piece_Z]
        held: tuple[Tensor, ...] = moments
        if groups is not None:
            assert flat.exp_avg_scale is not None
            assert flat.exp_avg_sq_scale is not None
            scales = flat.exp_avg_scale[piece_G], flat.exp_avg_sq_scale[piece_G]
            held = lean.Moments(*moments, *scales)
            moments = lean.dequantise(held, groups)
        own = corrections
        if flat.age is not None:
            own = _look_up(ages[piece_Z], by_age, corrections)
        master = join(param, remainder)
        grad = flat.grad[piece_Z].to(master.dtype)
        master, exp_avg, exp_avg_sq = adamw_values(master, grad, *moments, own, settings)
        values, rest = split(master, param.dtype)
        new: tuple[Tensor, ...] = exp_avg, exp_avg_sq
        if groups is not None:
            bits = lean.random_bits(piece_Z.start, piece_Z.stop, flat.step)
            new = lean.quantise(exp_avg, exp_avg_sq, groups, scales[0].numel(), bits)
            if rest is not None:
                rest = to_correction(rest, bits & 0xFF)
        for target, source in [*zip(held, new), (param, values), (remainder, rest)]:
            if target is not None and source is not None:
                put(target, source, skip)


def _pieces(flat: AdamWUpdate) -> Iterator[tuple[slice, Tensor | None, slice]]:
    """Yield slices of vectors; of 8-bit state also their entries' groups, and slices of scales."""
    if flat.is_lean:
        numel = flat.param.numel() if flat.mask is None else flat.mask.numel
        for groups, piece_Z, piece_G in lean.grouped_pieces(numel, flat.mask, flat.param.device):
            yield piece_Z, groups, piece_G
    else:
        # Without the mask, whose offsets would have to come to the host.
        for start, stop in bitmap.chunks(flat.param.numel()):
            yield slice(start, stop), None, slice(start, stop)
