"""Compile every Triton kernel in every variant that ``samo.kernels`` launches; needs no GPU.

    python -m tests.kernels.compile_kernels 90

test_triton.py runs it in a process of its own, since Triton's interpreter compiles nothing. To look
at the code: ``compile_kernel(...).asm["ptx"]``.
"""

import sys
from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

import torch
import triton.language as tl
from torch._higher_order_ops import triton_kernel_wrap
from torch._library.triton import get_triton_kernels_for_op
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from samo.kernels import (
    operators,  # noqa: F401  (registers operators)
    reference,
    triton_adamw,
    triton_launch as launch,
    triton_masks,
)
from samo.kernels.checks import EXPONENTS
from samo.kernels.triton_masks import KINDS
from tests.kernels.cases import LEAN_KINDS

NAMES = {
    torch.bfloat16: "i16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "i64",
}
TYPES = {"rows": "*i64", "grads": "*i64", "items": "*i32", "scalars": "*fp64", "skip": "*i8"}
TYPES |= dict.fromkeys(("lerp", "beta2", "lerp2", "eps"), "fp32")

Variant = tuple[Any, dict[str, str], dict[str, Any], int]
"""A kernel, the types of its arguments, its constants, and its warps."""


def variants() -> Iterator[Variant]:
    yield from mask_variants()
    for has_flags in (False, True):
        types = {"rows": "*i64", "scalars": "*fp64", "rates": "*fp64", "decays": "*fp64"}
        types |= {"skip": "*i8", "num_params": "i32"}
        types |= dict.fromkeys(("lr", "weight_decay", "beta1", "beta2"), "fp64")
        flags = dict.fromkeys(("HAS_RATES", "HAS_DECAYS"), has_flags)
        yield triton_adamw.adamw_scalars_kernel, types, {"SIZE": 128} | flags, 4
    # Flags in turns over the types: together only where one changes what another does.
    for (dtype, grad_dtype, copy_dtype), is_first in zip(LEAN_KINDS, cycle((False, True))):
        copy = None if copy_dtype is None else KINDS[copy_dtype]
        kept = {"WEIGHT": KINDS[dtype], "GRADIENT": KINDS[grad_dtype]}
        kept |= {"IS_SMALL": not is_first}
        parts = {"COPY": copy, "IS_ALIGNED": is_first}
        parts |= {"PARTS": launch.UNITS, "PART": launch.PART}
        for is_lean, oldest in ((False, 0), (False, reference.OLDEST), (True, 0)):
            types = TYPES | {"inverses": "*fp64", "denominators": "*fp32" if oldest else "*fp64"}
            state = {"IS_LEAN": is_lean, "OLDEST": oldest}
            state["REMAINDERS"] = tl.int8 if is_lean else tl.int16
            yield triton_adamw.adamw_kernel, types, kept | parts | state, 8
        # Other numbers of slots only repeat the same code.
        kept |= {"REMAINDERS": tl.int8, "BLOCKS": launch.UNITS, "SLOTS": 128 if is_first else 32}
        yield triton_adamw.adamw_lean_kept_kernel, TYPES, kept, 1
        if copy is not None:
            constants = {"VALUES": KINDS[dtype], "COPY": copy, "BLOCKS": launch.UNITS}
            constants |= {"IS_ALIGNED": is_first}
            yield triton_adamw.expand_rows_kernel, TYPES, constants, 2
    for dtype, exponent in EXPONENTS.items():
        types = {"rows": "*i64", "grads": "*i64", "items": "*i32", "found": "*i8"}
        kind = launch.INTEGERS[dtype.itemsize]
        constants = {"EXPONENT": exponent, "KIND": kind, "IS_ALIGNED": True}
        constants |= {"PARTS": launch.UNITS, "PART": launch.PART}
        yield triton_adamw.find_exponent_kernel, types, constants, 4


def mask_variants() -> Iterator[Variant]:
    moves = [(dtype, dtype) for dtype in NAMES]
    for source, target in dict.fromkeys([*moves, *product(KINDS, KINDS)]):
        common = {"words": "*i32", "offsets": "*i64", "after": "*" + NAMES[source]}
        common |= {"first_offset": "i64", "num_pairs": "i64", "numel": "i64", "num_words": "i32"}
        types = common | {"dense": "*" + NAMES[source], "out": "*" + NAMES[target]}
        yield triton_masks.compress_by_slot_kernel, types, {"SLOTS": 256}, 1
        yield triton_masks.compress_by_entry_kernel, types, {}, 2
        types = common | {"values": "*" + NAMES[source], "dense": "*" + NAMES[target]}
        yield triton_masks.expand_kernel, types, {}, 2


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


class FakeDriver:
    """As much of a driver as torch needs to read a kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def check_writes() -> None:
    """Check that torch.compile sees that the operators' kernels write only their results.

    It copies whatever a kernel may write to before and after each launch.
    """
    driver.set_active(FakeDriver())
    words, entries = torch.zeros(128, dtype=torch.int32), torch.zeros(4096, dtype=torch.bfloat16)
    mask = {"words": words, "offsets": words, "first_offset": 64}
    for kernel, arguments, result in (
        (
            triton_masks.compress_by_slot_kernel,
            {"dense": entries, "out": entries[:400], "num_pairs": 64, "SLOTS": 256},
            "out",
        ),
        (
            triton_masks.expand_kernel,
            {"values": entries[:400], "after": entries, "dense": entries}
            | {"numel": 4096, "num_words": 128},
            "dense",
        ),
    ):
        written = names_written(kernel, mask | arguments)
        assert written == {result}, f"{kernel.__name__}: torch takes {written} for written"


def names_written(kernel: Any, arguments: dict[str, Any]) -> set[str]:
    if hasattr(triton_kernel_wrap, "identify_accessed_tensors"):  # since torch 2.13
        found = triton_kernel_wrap.identify_accessed_tensors(kernel, arguments, {})
        return {each.name for each in found.read_writes.writes}
    return {*triton_kernel_wrap.identify_mutated_tensors(kernel, arguments, {})}


def check_caches() -> None:
    """Check that torch finds the operators' kernels: their code is part of its caches' keys."""
    for operator, kernel in (
        ("samo::compress_triton", triton_masks.compress_by_slot_kernel),
        ("samo::expand_triton", triton_masks.expand_kernel),
    ):
        assert get_triton_kernels_for_op(operator) == [kernel], operator


def main() -> None:
    """Compile for the capabilities on the command line; with --once, one variant per kernel."""
    found = list(variants())
    if "--once" in sys.argv:
        found = list({variant[0].__name__: variant for variant in found}.values())
    for capability in (int(argument) for argument in sys.argv[1:] if argument.isdigit()):
        made = [compile_kernel(variant, capability) for variant in found]
        assert all(kernel.asm["cubin"] for kernel in made)
        print(f"sm_{capability}: {len(made)} variants compile")
    check_writes()
    check_caches()


if __name__ == "__main__":
    main()
