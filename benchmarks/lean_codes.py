"""How far 8-bit moments lead AdamW astray, for several codes: numbers of decision 0012.

    python -m benchmarks.lean_codes

Gradients are drawn, no model is trained: 75 groups of 102 kept entries (1,024 entries at 90 %
sparsity), each entry with a mean and a size of its own. Two runs of AdamW's moments see the same
gradients, one in fp32 and one through codes. Reported is the error of the path, the sum of all
updates in the second half of the run, against the path of the fp32 run: root of the mean square
over entries.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from samo.kernels import lean

GROUPS, KEPT = 75, 102

Curve = Callable[[Tensor], Tensor]


class Code(NamedTuple):
    """Curves from a size between 0 and 1 to a part of the codes, and back."""

    bend: Curve
    straighten: Curve


LINEAR = Code(lambda x: x, lambda y: y)
SOFTSIGN = Code(lambda x: 2 * x / (1 + x), lambda y: y / (2 - y))
SQUARE = Code(lambda x: x.sqrt(), lambda y: y * y)
FOURTH = Code(lambda x: x.sqrt().sqrt(), lambda y: y**4)
LOGARITHM = Code(
    lambda x: 1 + x.clamp_min(2.0**-16).log2() / 16, lambda y: (2 ** (16 * (y - 1))) * (y > 0)
)

Codec = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""What storage for one step makes of both moments."""


def codec(
    first: Code, second: Code, *, dither: bool, is_scale_short: bool = False, kept: int = KEPT
) -> Codec:
    """Return a way to store moments in groups of ``kept`` entries."""

    def store(size: Tensor, code: Code, most: int) -> Tensor:
        scale = size.amax(1, keepdim=True)
        if is_scale_short:  # bfloat16, rounded up
            scale = (((scale.view(torch.int32) + 0xFFFF) >> 16) << 16).view(torch.float32)
        x = most * code.bend(torch.where(scale > 0, size / scale, 0.0))
        found = torch.floor(x + (torch.rand_like(x) if dither else 0.5)).clamp(0, most)
        if most == 255:
            found = torch.where((found == 0) & (size > 0), 1.0, found)
        return code.straighten(found / most) * scale

    def both(exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> tuple[Tensor, Tensor]:
        shape = exp_avg.shape
        exp_avg, root = exp_avg.view(-1, kept), exp_avg_sq.sqrt().view(-1, kept)
        stored = exp_avg.sign() * store(exp_avg.abs(), first, 127)
        return stored.view(shape), store(root, second, 255).square().view(shape)

    return both


def samo_codec(exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Store moments as samo does."""
    groups = torch.arange(GROUPS).repeat_interleave(KEPT)
    bits = lean.random_bits(0, GROUPS * KEPT, torch.tensor(float(step)))
    codes = lean.quantise(exp_avg.view(-1), exp_avg_sq.view(-1), groups, GROUPS, bits)
    new_exp_avg, new_exp_avg_sq = lean.dequantise(codes, groups)
    return new_exp_avg.view(exp_avg.shape), new_exp_avg_sq.view(exp_avg.shape)


CODECS: dict[str, Codec] = {
    "linear, linear root": codec(LINEAR, LINEAR, dither=False),
    "softsign, linear root": codec(SOFTSIGN, LINEAR, dither=False),
    "the same, bf16 scales, groups of 51": codec(
        SOFTSIGN, LINEAR, dither=False, is_scale_short=True, kept=51
    ),
    "softsign, linear root, dithered": codec(SOFTSIGN, LINEAR, dither=True),
    "logarithms (16 octaves)": codec(LOGARITHM, LOGARITHM, dither=False),
    "logarithms, dithered": codec(LOGARITHM, LOGARITHM, dither=True),
    "squares": codec(SQUARE, SQUARE, dither=False),
    "squares, dithered": codec(SQUARE, SQUARE, dither=True),
    "fourth powers": codec(FOURTH, FOURTH, dither=False),
    "fourth powers, dithered (samo)": samo_codec,
}

CASES = {
    "alike": (0.7, 1.0),
    "wide": (1.5, 1.0),
    "half stop": (0.7, 0.0),
    "half fade": (1.5, 0.01),
}
"""Spread of the entries' sizes (of their logarithms), and what half of them fade to in a third."""


def path_error(store: Codec, case: str, beta2: float, steps: int) -> float:
    """Return the relative error of the path."""
    spread, last = CASES[case]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    shape = (GROUPS, KEPT)
    size = 1e-3 * torch.exp(torch.randn(shape, generator=generator) * spread)
    mean = torch.randn(shape, generator=generator) * 0.3
    fades = torch.rand(shape, generator=generator) < 0.5
    exact, held = (torch.zeros(shape),) * 2, (torch.zeros(shape),) * 2
    paths = [torch.zeros(shape), torch.zeros(shape)]
    for step in range(1, steps + 1):
        grad = size * (mean + torch.randn(shape, generator=generator))
        grad = torch.where(fades, grad * (1 - (1 - last) * min(1.0, 3 * step / steps)), grad)
        exact, held = (
            (0.9 * a + 0.1 * grad, beta2 * b + (1 - beta2) * grad.square())
            for a, b in (exact, held)
        )
        if step > steps // 2:
            for path, (exp_avg, exp_avg_sq) in zip(paths, (exact, held)):
                root = exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5
                path += exp_avg / (1 - 0.9**step) / (root + 1e-8)
        held = store(*held, step)
    return float((paths[1] - paths[0]).norm() / paths[0].norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    print(f"| codes | {' | '.join(f'{case}, {b2}' for b2 in (0.999, 0.95) for case in CASES)} |")
    print("| --- " * (1 + 2 * len(CASES)) + "|")
    for name, store in CODECS.items():
        errors = [
            path_error(store, case, beta2, steps if beta2 == 0.999 else steps // 6)
            for beta2 in (0.999, 0.95)
            for case in CASES
        ]
        print(f"| {name} | {' | '.join(f'{100 * error:.1f} %' for error in errors)} |", flush=True)


if __name__ == "__main__":
    main()
