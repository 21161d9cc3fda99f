"""Compile the kernels of lean state in every variant that ``samo.kernels.cuda_lean`` launches.

    python -m tests.kernels.compile_lean_kernels 90

As compile_kernels.py, and like it run in a process of its own by the tests.
"""

from collections.abc import Iterator
from itertools import cycle

from samo.kernels import cuda, lean_kernels
from tests.kernels.compile_kernels import TRIPLES, Variant, compile_all, constants_of


def variants() -> Iterator[Variant]:
    types = {"rows": "*i64", "scales": "*i64", "items": "*i32", "scalars": "*fp64", "skip": "*i8"}
    types |= dict.fromkeys(("lerp", "beta2", "rest2", "eps"), "fp32")
    for triple, is_first in zip(TRIPLES, cycle((False, True))):
        constants = constants_of(triple, is_first) | {"WHOLE": lean_kernels.REST_KINDS[triple[0]]}
        # The other slots differ only in how often the same code stands there.
        kept = {"BLOCKS": cuda.ITEM_BLOCKS, "SLOTS": 128 if is_first else 32}
        kept |= {key: constants[key] for key in constants if key not in ("COPY", "IS_ALIGNED")}
        yield lean_kernels.adamw_lean_kept_kernel, types, kept, 1
        whole = {"PARTS": cuda.ITEM_PARTS, "PART": cuda.PART}
        yield lean_kernels.adamw_lean_all_kernel, types, constants | whole, 8


if __name__ == "__main__":
    compile_all(variants())
