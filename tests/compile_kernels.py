"""Compile every Triton kernel in every variant that ``samo.kernels.cuda`` launches; needs no GPU.

    python -m tests.compile_kernels 90

Run by test_triton.py in a process of its own, since Triton compiles nothing where it interprets. Also
handy to look at the code: ``compile_kernel(...).asm["ptx"]``.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import cycle, product
from typing import Any

import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from samo.kernels import age_kernels, cuda, cuda_ages, triton_kernels as tk
from samo.kernels.triton_parts import KINDS

NAMES = {
    torch.bfloat16: "i16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "i64",
}
PAIRS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
]

Variant = tuple[Any, dict[str, str], dict[str, Any], int]
"""A kernel, the types of its arguments, its constants, and its warps."""


def variants() -> Iterator[Variant]:
    yield from compress_variants()
    for dtype in NAMES:
        kind = "*" + NAMES[dtype]
        types = {"values": kind, "words": "*i32", "offsets": "*i64", "dense": kind}
        types |= {"numel": "i64", "num_words": "i32"}
        yield tk.expand_kernel, types, {"WORDS": 64}, cuda._EXPAND.num_warps
    for has_skip, has_scales, lr in product((False, True), (False, True), ("", "*fp32", "*fp64")):
        types = {"rows": "*i64", "scalars": "*fp32", "skip": "*i8", "lr_at": lr or "*fp32"}
        types["scales"] = "*fp64" if has_scales else "*fp32"
        types |= dict.fromkeys(("lr", "beta1", "beta2", "weight_decay"), "fp64")
        types["num_weights"] = "i32"
        constants = {
            "HAS_SKIP": has_skip,
            "HAS_SCALES": has_scales,
            "HAS_LR_AT": bool(lr),
            "SIZE": 128,
        }
        yield tk.adamw_scalars_kernel, types, constants, 4
    for lr in ("", "*fp32", "*fp64"):
        types = {"step_sizes": "*fp64", "denominators": "*fp32", "lr_at": lr or "*fp64"}
        types |= dict.fromkeys(("lr", "beta1", "beta2"), "fp64")
        constants = {"HAS_LR_AT": bool(lr), "SIZE": cuda_ages._SIZE}
        yield age_kernels.age_corrections_kernel, types, constants, 4
    # Flags in turns over the pairs of types: together only where one changes what another does.
    for (dtype, grad_dtype), is_first in zip(PAIRS, cycle((False, True))):
        types = {"rows": "*i64", "items": "*i32", "scalars": "*fp32", "skip": "*i8"}
        types |= dict.fromkeys(("lerp", "beta2", "rest2", "eps"), "fp32")
        constants = {
            "WEIGHT": KINDS[dtype],
            "WHOLE": KINDS[cuda.REST_KINDS[dtype]],
            "GRADIENT": KINDS[grad_dtype],
            "HAS_SKIP": is_first,
            "IS_SMALL": not is_first,
        }
        # The other slots differ only in how often the same code stands there.
        yield (
            tk.adamw_kept_kernel,
            types,
            constants | {"BLOCKS": cuda.ITEM_BLOCKS, "SLOTS": 128},
            1,
        )
        by_age = {"age_rows": "*i64", "step_sizes": "*fp64", "denominators": "*fp32"}
        for has_scales in (False, True):
            by_age["scales"] = "*fp64" if has_scales else "*fp32"
            yield (
                age_kernels.adamw_aged_kernel,
                types | by_age,
                constants | {"HAS_SCALES": has_scales, "BLOCKS": cuda.ITEM_BLOCKS, "SLOTS": 128},
                1,
            )
        whole = {"PARTS": cuda.ITEM_PARTS, "PART": cuda.PART}
        yield tk.adamw_all_kernel, types, constants | whole | {"IS_ALIGNED": is_first}, 8
    for kind, exponent in cuda._EXPONENTS.values():
        types = {"rows": "*i64", "items": "*i32", "found": "*i8"}
        constants = {"EXPONENT": exponent, "KIND": kind, "IS_ALIGNED": True}
        constants |= {"PARTS": cuda.ITEM_PARTS, "PART": cuda.PART}
        yield tk.find_exponent_kernel, types, constants, 4


def compress_variants() -> Iterator[Variant]:
    moves = [(dtype, dtype, False, False) for dtype in NAMES]
    sums = [
        (*pair, add, scaled) for pair, add, scaled in product(PAIRS, (False, True), (False, True))
    ]
    for dtype, out_dtype, add, has_factor in dict.fromkeys([*moves, *sums]):
        types = {"dense": "*" + NAMES[dtype], "out": "*" + NAMES[out_dtype], "factor": "*fp32"}
        masked = types | {"pairs": "*i64", "words": "*i32", "offsets": "*i64"}
        masked |= {"num_pairs": "i64", "numel": "i64", "num_words": "i32"}
        constants = {"ADD": add, "HAS_FACTOR": has_factor}
        yield tk.compress_by_slot_kernel, masked, constants | {"SLOTS": 256}, 1
        yield tk.compress_by_entry_kernel, masked, constants | {"WORDS": 64}, 2
        if has_factor:
            whole = types | {"numel": "i64"}
            yield tk.compress_all_kernel, whole, constants | {"SIZE": cuda.PART}, 4


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
