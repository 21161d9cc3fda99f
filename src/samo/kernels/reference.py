"""Plain torch operations: right on every device, and what the fast paths are compared with.

Tensors are walked in pieces of 2**20 entries, so that no temporary grows with a tensor and no whole
mask is ever unpacked.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from samo.kernels import AdamWSettings, AdamWUpdate
from samo.kernels.corrections import Corrections, count_step
from samo.kernels.rounding import join, split
from samo.kernels.sizes import check_pair, check_update
from samo.mask import bitmap
from samo.mask.mask import Mask

__all__ = ["adamw_", "compress_", "expand_", "find_nonfinite"]


def compress_(dense: Tensor, mask: Mask | None, out: Tensor) -> None:
    """Write the kept entries of ``dense`` to ``out``.

    Example: dense [5, 6, 7, 8] with kept bits 1, 0, 0, 1 gives [5, 8].
    """
    check_pair(out, mask, dense)
    flat_N = dense.detach().reshape(-1)
    with flattened(out) as flat_Z:
        for piece_N, keep, piece_Z in pieces(dense.numel(), mask):
            flat_Z[piece_Z] = flat_N[piece_N] if keep is None else flat_N[piece_N][keep]


def expand_(values: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Write ``values`` to the kept entries of ``dense`` and 0 elsewhere.

    Example: values [5, 8] with kept bits 1, 0, 0, 1 give [5, 0, 0, 8].
    """
    check_pair(values, mask, dense)
    flat_Z = values.detach().reshape(-1)
    with flattened(dense) as flat_N:
        for piece_N, keep, piece_Z in pieces(dense.numel(), mask):
            if keep is None:
                flat_N[piece_N] = flat_Z[piece_Z]
            else:
                flat_N[piece_N].zero_()[keep] = flat_Z[piece_Z].to(dense.dtype)


def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step with exactly the operations, in exactly the order, of torch's unfused one."""
    for update in updates:
        check_update(update)
    for update in updates:
        corrections = count_step(update, settings, skip)
        update_pieces(update, settings, skip, partial(_same, corrections))


def update_pieces(
    update: AdamWUpdate,
    settings: AdamWSettings,
    skip: Tensor | None,
    corrections_of: Callable[[slice], Corrections],
) -> None:
    """Update a parameter piece by piece; ``corrections_of`` is asked for each piece's corrections."""
    grad = update.grad.detach().reshape(-1)
    with ExitStack() as stack:
        param, exp_avg, exp_avg_sq = (
            stack.enter_context(flattened(tensor))
            for tensor in (update.param, update.exp_avg, update.exp_avg_sq)
        )
        rest = None if update.rest is None else stack.enter_context(flattened(update.rest))
        for piece, _, _ in pieces(param.numel(), None):
            held_rest = None if rest is None else rest[piece]
            master = join(param[piece], held_rest)
            held = (master, exp_avg[piece], exp_avg_sq[piece])
            new = adamw_values(
                master,
                grad[piece].to(master.dtype),
                exp_avg[piece],
                exp_avg_sq[piece],
                corrections_of(piece),
                settings,
            )
            for target, source in zip(held, new):
                put(target, source, skip)
            values, new_rest = split(master, param.dtype)
            put(param[piece], values, skip)
            if held_rest is not None and new_rest is not None:
                put(held_rest, new_rest, skip)
    refresh(update, skip)


def refresh(update: AdamWUpdate, skip: Tensor | None) -> None:
    """Write a parameter to its dense copy, if it has one."""
    if update.dense is None:
        return
    values = update.param.detach().reshape(-1)
    with flattened(update.dense) as flat_N:
        for piece_N, keep, piece_Z in pieces(flat_N.numel(), update.mask):
            new = values[piece_Z].to(flat_N.dtype)
            if keep is not None:
                spread = torch.zeros_like(flat_N[piece_N])
                spread[keep] = new
                new = spread
            put(flat_N[piece_N], new, skip)


def put(target: Tensor, source: Tensor, skip: Tensor | None) -> None:
    """Copy to ``target`` in place, unless ``skip`` is true."""
    target.copy_(source if skip is None else torch.where(skip, target, source))


def _same(corrections: Corrections, piece_Z: slice) -> Corrections:
    return corrections


def find_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether any entry of any tensor is NaN or infinite, as a boolean scalar on its device."""
    # The largest magnitude is NaN or infinite exactly if an entry is; a sum could overflow.
    norms = torch._foreach_norm([tensor for tensor in tensors if tensor.numel()], float("inf"))
    if not norms:
        return torch.zeros((), dtype=torch.bool, device=tensors[0].device if tensors else None)
    return ~torch.stack([norm.isfinite() for norm in norms]).all()


def adamw_values(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    corrections: Corrections,
    settings: AdamWSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new values and moments: new tensors."""
    step_size, correction, decay = corrections
    beta1, beta2, eps = settings
    exp_avg = exp_avg.lerp(grad, 1 - beta1)
    exp_avg_sq = exp_avg_sq.mul(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / correction).add_(eps)
    # Spelled out instead of addcdiv_, which takes no tensor as its value; the roundings are the same.
    change = (exp_avg * -step_size) / denominator
    return param.mul(decay).add_(change), exp_avg, exp_avg_sq


def pieces(numel: int, mask: Mask | None) -> Iterator[tuple[slice, Tensor | None, slice]]:
    """Yield pieces of a dense tensor, their kept bits, and where those lie in compressed vectors."""
    if mask is not None:
        yield from kept_pieces(mask)
        return
    for start, stop in bitmap.chunks(numel):
        yield slice(start, stop), None, slice(start, stop)


def kept_pieces(mask: Mask) -> Iterator[tuple[slice, Tensor, slice]]:
    """Yield pieces of a mask's tensor, their kept bits, and where those lie in compressed vectors."""
    spans = list(bitmap.chunks(mask.numel))
    first_blocks = [start // bitmap.BLOCK_BITS for start, _ in spans]
    # One copy to the host for all pieces, not one for each.
    begins = [*mask.offsets[first_blocks].tolist(), mask.kept]
    for (start, stop), begin, end in zip(spans, begins, begins[1:]):
        yield slice(start, stop), bitmap.unpack(mask.words, start, stop), slice(begin, end)


@contextmanager
def flattened(tensor: Tensor) -> Iterator[Tensor]:
    """Give a tensor as a vector to write to; a copy where strides (channels_last) allow no view."""
    flat = tensor.detach().reshape(-1)
    yield flat
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))
