"""``samo::compress`` and ``samo::expand``: the kernels as operators that compilers can see.

Eager code calls kernels directly: an operator written in Python costs the host some 50 us a call. Compiled
code calls these. On an NVIDIA GPU they are `torch.library.triton_op`, whose kernels Inductor launches
itself; elsewhere they are opaque to it.
"""

import torch
from torch import Tensor

from samo import kernels
from samo.mask import bitmap
from samo.mask.mask import Mask

__all__ = []

_SLOTS = 256
"""One way of compressing for all densities: another one for each would be another graph to compile."""


def compress(
    dense: Tensor, words: Tensor, offsets: Tensor, kept: int, dtype: torch.dtype
) -> Tensor:
    """Return the kept entries of a dense tensor."""
    if dense.is_cuda and _TRITON:
        return _compress_triton(dense.contiguous(), words, offsets, kept, dtype)
    return _compress(dense, words, offsets, kept, dtype)


def expand(
    values: Tensor,
    words: Tensor,
    offsets: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    after: Tensor | None,
) -> Tensor:
    """Return the dense tensor of kept entries, 0 elsewhere.

    ``after`` is not read. A backward pass that expands again gives its gradient here: the compiler then
    cannot take the forward pass's expansion in its place, which would be held in between.
    """
    if values.is_cuda and _TRITON:
        after = values if after is None else after
        return _expand_triton(values, words, offsets, after, shape, dtype)
    return _expand(values, words, offsets, shape, dtype, after)


@torch.library.custom_op("samo::compress", mutates_args=())
def _compress(
    dense: Tensor, words: Tensor, offsets: Tensor, kept: int, dtype: torch.dtype
) -> Tensor:
    values = torch.empty(kept, dtype=dtype, device=dense.device)
    mask = Mask.from_parts(dense.shape, words, offsets, kept)
    kernels.choose(dense.device).compress_(dense, mask, values)
    return values


@_compress.register_fake
def _(dense: Tensor, words: Tensor, offsets: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    return dense.new_empty(kept, dtype=dtype)


@torch.library.custom_op("samo::expand", mutates_args=())
def _expand(
    values: Tensor,
    words: Tensor,
    offsets: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    after: Tensor | None,
) -> Tensor:
    dense = torch.empty(shape, dtype=dtype, device=values.device)
    mask = Mask.from_parts(shape, words, offsets, values.numel())
    kernels.choose(values.device).expand_(values, mask, dense)
    return dense


@_expand.register_fake
def _(
    values: Tensor,
    words: Tensor,
    offsets: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    after: Tensor | None,
) -> Tensor:
    return values.new_empty(shape, dtype=dtype)


try:
    from samo.kernels.triton_common import IS_INTERPRETED
    from samo.kernels.triton_kernels import compress_by_slot_kernel, expand_kernel
except ImportError:
    _TRITON = False
else:
    _TRITON = not IS_INTERPRETED.value and torch.version.hip is None

    @torch.library.triton_op("samo::compress_triton", mutates_args=())
    def _compress_triton(
        dense: Tensor, words: Tensor, offsets: Tensor, kept: int, dtype: torch.dtype
    ) -> Tensor:
        values = torch.empty(kept, dtype=dtype, device=dense.device)
        torch.library.wrap_triton(compress_by_slot_kernel)[(offsets.numel(),)](
            dense, words, offsets, values, words.numel() // 2, SLOTS=_SLOTS, num_warps=1
        )
        return values

    @torch.library.triton_op("samo::expand_triton", mutates_args=())
    def _expand_triton(
        values: Tensor,
        words: Tensor,
        offsets: Tensor,
        after: Tensor,
        shape: list[int],
        dtype: torch.dtype,
    ) -> Tensor:
        dense = torch.empty(shape, dtype=dtype, device=values.device)
        torch.library.wrap_triton(expand_kernel)[(offsets.numel(),)](
            values,
            words,
            offsets,
            after,
            dense,
            dense.numel(),
            words.numel(),
            WORDS=bitmap.BLOCK_WORDS,
            num_warps=2,
        )
        return dense
