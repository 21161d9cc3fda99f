"""compress, expand and AdamW on a CPU: the candidates beside each other, at 1, 2 and 4 times the size.

The candidates:

    reference    plain torch operations, the mask unpacked piece by piece
    index        torch operations with an int64 index of the kept entries, 8 bytes each
    compiled     the same, compiled by torch.compile
    samo         loops over the bitmap, compiled by numba (kernels="auto")
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import Row, arguments, in_turns, show, spread, write_rows
from samo.kernels import AdamWSettings, AdamWUpdate, Kernels, choose
from samo.mask.mask import Mask

DENSITY = 0.1
LR, WEIGHT_DECAY = 1e-3, 0.1
SETTINGS = AdamWSettings(0.9, 0.999, 1e-8)


class Problem:
    """One pruned tensor with everything an update needs."""

    def __init__(self, numel: int) -> None:
        keep = torch.rand(numel) < DENSITY
        self.mask = Mask.from_bool(keep)
        self.index = keep.nonzero().squeeze(1)
        self.source = torch.randn(numel)
        kept = self.mask.kept
        self.values, self.dense = torch.randn(kept), torch.zeros(numel)
        self.out, self.grad = torch.empty(kept), torch.randn(kept)
        self.exp_avg, self.exp_avg_sq = torch.zeros(kept), torch.zeros(kept)


def with_kernels(kernels: Kernels, problem: Problem) -> dict[str, Callable[[], object]]:
    """Return the three operations of an implementation of samo."""
    p = problem
    update = AdamWUpdate(
        p.values,
        None,
        p.grad,
        p.exp_avg,
        p.exp_avg_sq,
        torch.zeros(()),
        LR,
        WEIGHT_DECAY,
        p.dense,
        p.mask,
    )
    return {
        "compress": lambda: kernels.compress_(p.source, p.mask, p.out),
        "expand": lambda: kernels.expand_(p.grad, p.mask, p.source),
        "adamw": lambda: kernels.adamw_([update], SETTINGS, None),
    }


def index_compress(source: Tensor, index: Tensor, out: Tensor) -> None:
    """Gather by index."""
    torch.index_select(source, 0, index, out=out)


def index_expand(values: Tensor, index: Tensor, dense: Tensor) -> None:
    """Scatter by index into zeros."""
    dense.zero_().index_copy_(0, index, values)


def index_adamw(
    values: Tensor, dense: Tensor, index: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> None:
    """Update, and scatter by index."""
    beta1, beta2, eps = SETTINGS
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    change = exp_avg / (exp_avg_sq.sqrt() / 0.3 + eps)  # as if after some 100 steps
    values.mul_(1 - LR * WEIGHT_DECAY).sub_(change, alpha=LR)
    dense.index_copy_(0, index, values)


def with_index(problem: Problem, *, is_compiled: bool) -> dict[str, Callable[[], object]]:
    """Return the three operations with a stored index."""
    p = problem

    def prepare(run: Callable[..., None]) -> Callable[..., None]:
        return torch.compile(run, dynamic=True) if is_compiled else run

    gather = prepare(lambda source, index, out: out.copy_(source[index]))
    compress = gather if is_compiled else index_compress  # out= does not compile
    expand, adamw = prepare(index_expand), prepare(index_adamw)
    return {
        "compress": lambda: compress(p.source, p.index, p.out),
        "expand": lambda: expand(p.grad, p.index, p.source),
        "adamw": lambda: adamw(p.values, p.dense, p.index, p.grad, p.exp_avg, p.exp_avg_sq),
    }


def run(base: int, *, rounds: int) -> list[Row]:
    """Time every candidate at three sizes, and a copy of the dense tensor for scale."""
    rows = []
    for factor in (1, 2, 4):
        problem = Problem(base * factor)
        cpu = torch.device("cpu")
        candidates = {
            "reference": with_kernels(choose(cpu, "reference"), problem),
            "index": with_index(problem, is_compiled=False),
            "compiled": with_index(problem, is_compiled=True),
            "samo": with_kernels(choose(cpu), problem),
        }
        target = torch.empty_like(problem.source)
        timed: dict[str, Callable[[], object]] = {
            "copy / dense": functools.partial(target.copy_, problem.source)
        }
        for name, operations in candidates.items():
            timed |= {f"{operation} / {name}": call for operation, call in operations.items()}
        for name, times in in_turns(timed, rounds=rounds).items():
            operation, _, candidate = name.partition(" / ")
            found = spread(times)
            rows.append(
                {
                    "operation": operation,
                    "candidate": candidate,
                    "numel": problem.mask.numel,
                    "density": DENSITY,
                    "ms": found["median"],
                    "p20_ms": found["p20"],
                    "p80_ms": found["p80"],
                    "ns_per_weight": round(found["median"] * 1e6 / problem.mask.numel, 4),
                    "rounds": rounds,
                }
            )
    return rows


def main() -> None:
    """Run the benchmark and print its table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="runs of each candidate")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = run(2**14 if options.toy else 2**24, rounds=options.rounds)
    rows.sort(key=lambda row: (row["operation"], row["candidate"], row["numel"]))
    show(rows, ["operation", "candidate", "numel", "ms", "p20_ms", "p80_ms", "ns_per_weight"])
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
