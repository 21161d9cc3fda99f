"""Compile the kernels of lean state in every variant that ``samo.kernels.cuda_lean`` launches.

    python -m tests.compile_lean_kernels 90

As compile_kernels.py, and like it run in a process of its own by the tests.
"""

from collections.abc import Iterator
from itertools import cycle

from samo.kernels import cuda, lean_kernels
from samo.kernels.triton_parts import KINDS
from tests.compile_kernels import PAIRS, Variant, compile_all


def variants() -> Iterator[Variant]:
    types = {"rows": "*i64", "scales": "*i64", "items": "*i32", "scalars": "*fp32", "skip": "*i8"}
    types |= dict.fromkeys(("lerp", "beta2", "rest2", "eps"), "fp32")
    for (dtype, grad_dtype), is_first in zip(PAIRS, cycle((False, True))):
        constants = {
            "WEIGHT": KINDS[dtype],
            "WHOLE": lean_kernels.REST_KINDS[dtype],
            "GRADIENT": KINDS[grad_dtype],
            "HAS_SKIP": is_first,
            "IS_SMALL": not is_first,
        }
        # The other slots differ only in how often the same code stands there.
        kept = {"BLOCKS": cuda.ITEM_BLOCKS, "SLOTS": 128 if is_first else 32}
        yield lean_kernels.adamw_lean_kept_kernel, types, constants | kept, 1
        whole = {"PARTS": cuda.ITEM_PARTS, "PART": cuda.PART, "IS_ALIGNED": is_first}
        yield lean_kernels.adamw_lean_all_kernel, types, constants | whole, 8


if __name__ == "__main__":
    compile_all(variants())
