"""Compile every Triton kernel in every variant that ``samo.kernels.cuda`` launches; needs no GPU.

    python -m tests.kernels.compile_kernels 90

Run by test_triton.py in a process of its own, since Triton compiles nothing where it interprets. Also
handy to look at the code: ``compile_kernel(...).asm["ptx"]``.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import cycle, product
from typing import Any

import torch
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from samo.kernels import ages, cuda, triton_kernels as tk
from samo.kernels.triton_parts import KINDS

NAMES = {
    torch.bfloat16: "i16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "i64",
}
# Parameters, gradients and dense copies.
TRIPLES: list[tuple[torch.dtype, torch.dtype, torch.dtype | None]] = [
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.float32, torch.float16),
    (torch.float32, torch.float16, torch.float16),
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, None),
    (torch.float32, torch.float32, None),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, None),
    (torch.float16, torch.float32, torch.float16),
    (torch.float16, torch.bfloat16, None),
]

Variant = tuple[Any, dict[str, str], dict[str, Any], int]
"""A kernel, the types of its arguments, its constants, and its warps."""


def variants() -> Iterator[Variant]:
    yield from mask_variants()
    for has_skip, has_rates, has_decays in product((False, True), repeat=3):
        yield scalars_variant(has_skip, None, has_rates, has_decays)
    for rate in (tl.float32, tl.float64):
        yield scalars_variant(False, rate, False, True)
    # Flags in turns over the types: together only where one changes what another does.
    for triple, is_first in zip(TRIPLES, cycle((False, True))):
        types = {"rows": "*i64", "items": "*i32", "scalars": "*fp64", "skip": "*i8"}
        types |= {"age_rows": "*i64", "inverses": "*fp64", "denominators": "*fp64"}
        types |= dict.fromkeys(("lerp", "beta2", "rest2", "eps"), "fp32")
        constants = constants_of(triple, is_first) | {
            "WHOLE": KINDS[cuda.REST_KINDS[triple[0]]],
            "OLDEST": 0,
        }
        whole = {"PARTS": cuda.ITEM_PARTS, "PART": cuda.PART}
        by_age = types | {"denominators": "*fp32"}
        yield tk.adamw_all_kernel, types, constants | whole, 8
        yield tk.adamw_all_kernel, by_age, constants | whole | {"OLDEST": ages.OLDEST}, 8
        if triple[2] is not None:
            types = {"rows": "*i64", "items": "*i32", "skip": "*i8" if is_first else "*i32"}
            constants = {"VALUES": KINDS[triple[0]], "COPY": KINDS[triple[2]]}
            constants |= {"HAS_SKIP": is_first, "IS_ALIGNED": is_first, "BLOCKS": cuda.ITEM_BLOCKS}
            yield tk.expand_rows_kernel, types, constants, 2
    for kind, exponent in cuda._EXPONENTS.values():
        types = {"rows": "*i64", "items": "*i32", "found": "*i8"}
        constants = {"EXPONENT": exponent, "KIND": kind, "IS_ALIGNED": True}
        constants |= {"PARTS": cuda.ITEM_PARTS, "PART": cuda.PART}
        yield tk.find_exponent_kernel, types, constants, 4


def constants_of(
    triple: tuple[torch.dtype, torch.dtype, torch.dtype | None], is_first: bool
) -> dict[str, Any]:
    dtype, grad_dtype, copy_dtype = triple
    return {
        "WEIGHT": KINDS[dtype],
        "GRADIENT": KINDS[grad_dtype],
        "COPY": None if copy_dtype is None else KINDS[copy_dtype],
        "HAS_SKIP": is_first,
        "IS_SMALL": not is_first,
        "IS_ALIGNED": is_first,
    }


def scalars_variant(has_skip: bool, rate: Any, has_rates: bool, has_decays: bool) -> Variant:
    types = {"rows": "*i64", "scalars": "*fp64", "rates": "*fp64", "decays": "*fp64"}
    types["skip"] = "*i8" if has_skip else "*fp64"
    types |= dict.fromkeys(("lr", "weight_decay", "beta1", "beta2"), "fp64")
    types["num_params"] = "i32"
    constants = {
        "RATE_TYPE": rate,
        "HAS_RATES": has_rates,
        "HAS_DECAYS": has_decays,
        "HAS_SKIP": has_skip,
        "SIZE": 128,
    }
    return tk.adamw_scalars_kernel, types, constants, 4


def mask_variants() -> Iterator[Variant]:
    moves = [(dtype, dtype) for dtype in NAMES]
    for source, target in dict.fromkeys([*moves, *product(KINDS, KINDS)]):
        common = {"words": "*i32", "offsets": "*i64", "after": "*" + NAMES[source]}
        common |= {"num_pairs": "i64", "numel": "i64", "num_words": "i32"}
        types = common | {"dense": "*" + NAMES[source], "out": "*" + NAMES[target]}
        yield tk.compress_by_slot_kernel, types, {"SLOTS": 256}, 1
        yield tk.compress_by_entry_kernel, types, {"WORDS": 64}, 2
        types = common | {"values": "*" + NAMES[source], "dense": "*" + NAMES[target]}
        yield tk.expand_kernel, types, {"WORDS": 64}, 2


def compile_kernel(variant: Variant, capability: int) -> Any:
    kernel, types, constants, num_warps = variant
    names = kernel.arg_names
    # As at a launch: pointers come from torch's allocator, and sizes are mostly round.
    round_names = [name for name in names if types.get(name, "").startswith("*") or name == "numel"]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in round_names},
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": not kernel.__name__.startswith("adamw_")}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_all(variants: Iterable[Variant]) -> None:
    """Compile for the capability named on the command line; with --once, each kernel in one variant.

    Variants differ in types and flags, which every GPU knows alike: one GPU gets them all, and of another
    it is enough to know that each kernel is possible there.
    """
    capability = int(sys.argv[1])
    if "--once" in sys.argv[2:]:
        variants = {variant[0].__name__: variant for variant in variants}.values()
    made = [compile_kernel(variant, capability) for variant in variants]
    assert all(kernel.asm["cubin"] for kernel in made)
    print(f"sm_{capability}: {len(made)} variants compile")


if __name__ == "__main__":
    compile_all(variants())
