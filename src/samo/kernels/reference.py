"""Plain torch operations: right on every device, and what the fast paths are compared with.

Tensors are walked in pieces of 2**20 entries, so that no temporary grows with a tensor and no whole
mask is ever unpacked.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from samo import bitmap
from samo.kernels import AdamWSettings, AdamWUpdate
from samo.kernels.corrections import Corrections, count_step
from samo.kernels.rounding import join, split
from samo.mask import Mask

__all__ = ["adamw_", "compress_", "expand_", "find_nonfinite"]


def compress_(
    dense: Tensor,
    mask: Mask | None,
    out_Z: Tensor,
    *,
    add: bool = False,
    factor: Tensor | None = None,
) -> None:
    """Write or add the kept entries of ``dense`` to ``out_Z``.

    Example: dense [5, 6, 7, 8] with kept bits 1, 0, 0, 1 gives [5, 8].
    """
    for piece_N, keep, piece_Z in pieces(dense.detach().reshape(-1), mask):
        values = piece_N if keep is None else piece_N[keep]
        if factor is not None:
            values = values.to(torch.float32) * factor
        if add:
            # torch adds 16-bit numbers in fp32 and rounds once, whatever their two types.
            out_Z[piece_Z].add_(values)
        else:
            out_Z[piece_Z] = values


def expand_(values_Z: Tensor, mask: Mask | None, dense: Tensor) -> None:
    """Write ``values_Z`` to the kept entries of ``dense`` and 0 elsewhere.

    Example: values [5, 8] with kept bits 1, 0, 0, 1 give [5, 0, 0, 8].
    """
    flat_N = dense.detach().reshape(-1)
    for piece_N, keep, piece_Z in pieces(flat_N, mask):
        if keep is None:
            piece_N.copy_(values_Z[piece_Z])
        else:
            piece_N.zero_()[keep] = values_Z[piece_Z]
    write_back(flat_N, dense)


def adamw_(updates: Sequence[AdamWUpdate], settings: AdamWSettings, skip: Tensor | None) -> None:
    """Do one AdamW step with exactly the operations, in exactly the order, of torch's unfused one."""
    for update in updates:
        corrections = count_step(update, settings, skip)
        update_pieces(update, settings, skip, partial(_same, corrections))


def update_pieces(
    update: AdamWUpdate,
    settings: AdamWSettings,
    skip: Tensor | None,
    corrections_of: Callable[[slice], Corrections],
) -> None:
    """Update a weight piece by piece; ``corrections_of`` is asked for each piece's corrections."""
    flat_N = update.dense.detach().reshape(-1)
    for piece_N, keep, piece_Z in pieces(flat_N, update.mask):
        old = piece_N if keep is None else piece_N[keep]
        rest = None if update.rest_Z is None else update.rest_Z[piece_Z]
        master = join(old, rest)
        exp_avg, exp_avg_sq = update.exp_avg_Z[piece_Z], update.exp_avg_sq_Z[piece_Z]
        new = adamw_values(
            master,
            update.grad_Z[piece_Z].to(master.dtype),
            exp_avg,
            exp_avg_sq,
            corrections_of(piece_Z),
            settings,
        )
        for target, source in zip((master, exp_avg, exp_avg_sq), new):
            target.copy_(source if skip is None else torch.where(skip, target, source))
        values, new_rest = split(master, piece_N.dtype)
        if keep is None:
            piece_N.copy_(values)
        else:
            piece_N[keep] = values
        if rest is not None and new_rest is not None:
            rest.copy_(new_rest)
    write_back(flat_N, update.dense)


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
    _, beta1, beta2, eps, _ = settings
    exp_avg = exp_avg.lerp(grad, 1 - beta1)
    exp_avg_sq = exp_avg_sq.mul(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / correction).add_(eps)
    # Spelled out instead of addcdiv_, which takes no tensor as its value; the roundings are the same.
    change = (exp_avg * -step_size) / denominator
    return param.mul(decay).add_(change), exp_avg, exp_avg_sq


def pieces(flat_N: Tensor, mask: Mask | None) -> Iterator[tuple[Tensor, Tensor | None, slice]]:
    """Yield views of the dense tensor, their kept bits, and where those lie in compressed vectors."""
    numel = flat_N.numel()
    if mask is None:
        for start, stop in bitmap.chunks(numel):
            yield flat_N[start:stop], None, slice(start, stop)
        return
    spans = list(bitmap.chunks(numel))
    first_blocks = [start // bitmap.BLOCK_BITS for start, _ in spans]
    # One copy to the host for all pieces, not one for each.
    begins = [*mask.offsets[first_blocks].tolist(), mask.kept]
    for (start, stop), begin, end in zip(spans, begins, begins[1:]):
        yield flat_N[start:stop], bitmap.unpack(mask.words, start, stop), slice(begin, end)


def write_back(flat_N: Tensor, dense: Tensor) -> None:
    """Finish a write: ``reshape`` made a copy where the strides (channels_last) allow no view."""
    if not dense.is_contiguous():
        dense.detach().copy_(flat_N.view(dense.shape))
