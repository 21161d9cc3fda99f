"""``samo::compress`` and ``samo::expand``: the kernels as operators, for compiled code.

Eager code calls kernels directly, since an operator written in Python costs some 50 us per call. On
an NVIDIA GPU these are `torch.library.triton_op`, whose kernels Inductor launches itself; elsewhere
they are opaque to it.
"""

import os
from typing import Final

import torch
import torch._inductor.config
from torch import Tensor
from torch.library import triton_op, wrap_triton

from samo import kernels
from samo.mask.bitmap import num_blocks, num_words as num_words_of
from samo.mask.mask import Mask

_STATIC_LAUNCH: Final = "static_launch_user_defined_triton_kernels"

_SLOTS = 256
"""The same for all densities: another number would be another graph to compile."""


def launch_statically() -> None:
    """Let Inductor launch these kernels without Python, which is noticeable in host-bound steps.

    Call it before the first compilation. Inductor compiles kernels in other processes, which get
    its setting from the environment alone: ``torch.compile(options=...)`` does not reach them.
    """
    if os.environ.setdefault(f"TORCHINDUCTOR_{_STATIC_LAUNCH.upper()}", "1") == "1":
        setattr(torch._inductor.config, _STATIC_LAUNCH, True)


def compress(dense: Tensor, bitmap: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    """Return the kept entries of a dense tensor; ``bitmap`` is a `Mask.packed`."""
    if dense.is_cuda and _TRITON:
        return _compress_triton(dense.contiguous(), bitmap, kept, dtype)
    return _compress(dense, bitmap, kept, _NAMES[dtype])


def expand(
    values: Tensor, bitmap: Tensor, shape: list[int], dtype: torch.dtype, after: Tensor | None
) -> Tensor:
    """Return the dense tensor of kept entries, 0 elsewhere.

    ``after`` is not read. A backward pass that expands again passes its gradient, so the compiler
    cannot keep the forward pass's expansion instead.
    """
    if values.is_cuda and _TRITON:
        return _expand_triton(values, bitmap, values if after is None else after, shape, dtype)
    return _expand(values, bitmap, shape, _NAMES[dtype], after)


_NAMES: Final = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
"""AOTInductor of torch 2.11 gives operators a wrong dtype, but the right string."""


@torch.library.custom_op("samo::compress", mutates_args=())
def _compress(dense: Tensor, bitmap: Tensor, kept: int, dtype: str) -> Tensor:
    values = torch.empty(kept, dtype=getattr(torch, dtype), device=dense.device)
    mask = Mask.from_packed(dense.shape, bitmap, kept)
    kernels.choose(dense.device).compress_(dense, mask, values)
    return values


@_compress.register_fake
def _(dense, bitmap, kept, dtype):
    return dense.new_empty(kept, dtype=getattr(torch, dtype))


@torch.library.custom_op("samo::expand", mutates_args=())
def _expand(
    values: Tensor, bitmap: Tensor, shape: list[int], dtype: str, after: Tensor | None
) -> Tensor:
    dense = torch.empty(shape, dtype=getattr(torch, dtype), device=values.device)
    mask = Mask.from_packed(shape, bitmap, values.numel())
    kernels.choose(values.device).expand_(values, mask, dense)
    return dense


@_expand.register_fake
def _(values, bitmap, shape, dtype, after):
    return values.new_empty(shape, dtype=getattr(torch, dtype))


try:
    from samo.kernels.triton_masks import IS_INTERPRETED, compress_by_slot_kernel, expand_kernel
    from samo.kernels.triton_tables import device_of
except ImportError:
    _TRITON = False
else:
    _TRITON = not IS_INTERPRETED.value and torch.version.hip is None

    # By the plain name wrap_triton, under which torch finds the kernels whose code is part of the
    # key of its caches on disk.

    @triton_op("samo::compress_triton", mutates_args=())
    def _compress_triton(dense: Tensor, bitmap: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
        values = torch.empty(kept, dtype=dtype, device=dense.device)
        num_pairs, blocks = num_words_of(dense.numel()) // 2, num_blocks(dense.numel())
        with device_of(dense):
            wrap_triton(compress_by_slot_kernel)[(blocks,)](
                dense, bitmap, bitmap, num_pairs, values, num_pairs, SLOTS=_SLOTS, num_warps=1
            )
        return values

    @triton_op("samo::expand_triton", mutates_args=())
    def _expand_triton(
        values: Tensor, bitmap: Tensor, after: Tensor, shape: list[int], dtype: torch.dtype
    ) -> Tensor:
        dense = torch.empty(shape, dtype=dtype, device=values.device)
        num_words, blocks = num_words_of(dense.numel()), num_blocks(dense.numel())
        first_offset, numel = num_words // 2, dense.numel()
        with device_of(values):
            wrap_triton(expand_kernel)[(blocks,)](
                values, bitmap, bitmap, first_offset, after, dense, numel, num_words, num_warps=2
            )
        return dense
