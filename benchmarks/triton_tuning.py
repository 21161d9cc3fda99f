"""Which way to launch the Triton kernels is fastest on this GPU?

    python -m benchmarks.triton_tuning --out rows.jsonl

Times every candidate on one pruned bfloat16 tensor of 2**30 weights, 10 % kept, in turns, and prints
for each the ratio to the floor, the time in which the bytes that must move would move at the
bandwidth of a copy. Every candidate's result is compared with torch's first. What wins goes into
``compress_config``, ``adamw_config`` and ``_EXPAND`` of ``samo/kernels/cuda.py``.

    compress       gather the kept entries of a gradient; "add" accumulates, "fp32" widens besides
    expand         write values and zeros
    adamw          the whole update of the dense weight: fused, where each program gathers, updates and
                   scatters; and in three passes over a compressed copy, which needs 2f bytes a weight
                   more memory
    adamw, many    the same number of weights in 512 tensors: the launches should not show
    host           time until the call returns, the device still at work
"""

import os
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.measure import Row, arguments, show, write_rows

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # only to see that it runs: --toy

from samo.kernels import AdamWSettings, AdamWUpdate, cuda
from samo.kernels.rounding import split
from samo.mask import Mask

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SETTINGS = AdamWSettings(1e-3, 0.9, 0.999, 1e-8, 0.1)
SECTOR = 16  # entries of bfloat16 that a GPU reads or writes at once


class Problem:
    """One pruned tensor with everything an update needs."""

    def __init__(self, numel: int, density: float) -> None:
        keep = torch.empty(numel, dtype=torch.bool, device=DEVICE)
        for part in keep.split(2**26):
            part.copy_(torch.rand(part.numel(), device=DEVICE) < density)
        self.mask = Mask.from_bool(keep)
        kept = self.mask.kept
        self.source = torch.randn(numel, dtype=torch.bfloat16, device=DEVICE)
        self.expected = self.source[keep]
        self.out = torch.zeros(kept, dtype=torch.bfloat16, device=DEVICE)
        self.wide = torch.zeros(kept, dtype=torch.float32, device=DEVICE)
        self.dense = self.source * keep
        del keep
        self.copy = torch.empty_like(self.source)
        self.rest = torch.zeros(kept, dtype=torch.int16, device=DEVICE)
        self.grad = (torch.randn(kept, device=DEVICE) * 1e-2).bfloat16()
        self.moments = [torch.zeros(kept, device=DEVICE) for _ in range(2)]
        self.step = torch.zeros((), device=DEVICE)
        self.skip = torch.zeros((), dtype=torch.bool, device=DEVICE)

    def update(self) -> AdamWUpdate:
        exp_avg, exp_avg_sq = self.moments
        return AdamWUpdate(
            self.dense, self.mask, self.rest, self.grad, exp_avg, exp_avg_sq, self.step
        )


def configs(kind: str) -> list[cuda.Config]:
    """Return the candidates for a kernel."""
    slots = [cuda.Config("slot", size, 1) for size in (32, 64, 128, 256, 512)]
    slots += [cuda.Config("slot", size, 2) for size in (128, 256)]
    entries = [
        cuda.Config("entry", words, warps)
        for words, warps in ((64, 1), (64, 2), (64, 4), (128, 2), (128, 4), (256, 4), (256, 8))
    ]
    return {"compress": slots + entries, "expand": entries, "adamw": slots}[kind]


def candidates(p: Problem) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return name, bytes that must move, and what to run."""
    numel, kept = p.mask.numel, p.mask.kept
    moved = 2 * numel + numel / 8 + 2 * kept
    touched = 1 - (1 - kept / numel) ** SECTOR
    fused = 2 * numel * (1 + touched) + numel / 8 + 22 * kept
    found: dict[str, tuple[float, Callable[[], object]]] = {}
    for c in configs("compress"):
        found[f"compress {_say(c)}"] = (moved, lambda c=c: _compress(p, c))  # type: ignore[misc]
    default = cuda.compress_config(kept, numel)
    found["compress default, add"] = (
        moved + 2 * kept,
        lambda: cuda.launch_compress(default, p.source, p.mask, p.out, add=True),
    )
    found["compress default, fp32 add"] = (
        moved + 6 * kept,
        lambda: cuda.launch_compress(default, p.source, p.mask, p.wide, add=True),
    )
    for c in configs("expand"):
        found[f"expand {_say(c)}"] = (
            moved,
            lambda c=c: cuda.launch_expand(c, p.expected, p.mask, p.copy),  # type: ignore[misc]
        )
    for c in configs("adamw"):
        found[f"adamw fused {_say(c)}"] = (
            fused,
            lambda c=c: cuda.launch_adamw([p.update()], SETTINGS, p.skip, c),  # type: ignore[misc]
        )
    found["adamw three passes"] = (2 * moved + 26 * kept, lambda: _three_passes(p))
    return found


def _compress(p: Problem, config: cuda.Config) -> None:
    cuda.launch_compress(config, p.source, p.mask, p.out)


def _three_passes(p: Problem) -> None:
    update = p.update()
    cuda.compress_(p.dense, p.mask, p.out)
    cuda.launch_adamw([update._replace(dense=p.out, mask=None)], SETTINGS, p.skip)
    cuda.expand_(p.out, p.mask, p.dense)


def check(p: Problem) -> None:
    """Compare every candidate with plain torch once."""
    for c in configs("compress"):
        p.out.zero_()
        _compress(p, c)
        assert torch.equal(p.out, p.expected), f"compress {_say(c)} is wrong"
    for c in configs("expand"):
        p.copy.fill_(7)
        cuda.launch_expand(c, p.expected, p.mask, p.copy)
        assert torch.equal(p.copy, p.dense), f"expand {_say(c)} is wrong"
    before, first = p.dense.clone(), None
    for run in [*(_fused(p, c) for c in configs("adamw")), lambda: _three_passes(p)]:
        p.dense.copy_(before)
        for tensor in (p.rest, *p.moments, p.step):
            tensor.zero_()
        run()
        if first is None:
            first = (p.dense.clone(), p.rest.clone())
            assert not torch.equal(p.dense, before), "adamw changes nothing"
        assert torch.equal(p.dense, first[0]), "two ways to update differ"
        assert torch.equal(p.rest, first[1]), "two ways to update differ"


def _fused(p: Problem, config: cuda.Config) -> Callable[[], object]:
    return lambda: cuda.launch_adamw([p.update()], SETTINGS, p.skip, config)


def many(numel: int, density: float, count: int) -> list[AdamWUpdate]:
    """Return ``count`` pruned weights, and as many small unpruned ones."""
    updates = []
    for index in range(2 * count):
        size = numel // count if index % 2 else 64
        keep = torch.rand(size, device=DEVICE) < (density if index % 2 else 2.0)
        mask = Mask.from_bool(keep)
        values, rest = split(torch.randn(mask.kept, device=DEVICE), torch.bfloat16)
        dense = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
        dense[keep] = values
        zeros = [torch.zeros(mask.kept, device=DEVICE) for _ in range(2)]
        grad = torch.randn(mask.kept, device=DEVICE).bfloat16()
        step = torch.zeros((), device=DEVICE)
        updates.append(
            AdamWUpdate(dense, mask if index % 2 else None, rest, grad, zeros[0], zeros[1], step)
        )
    return updates


def time_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds the device takes."""
    if DEVICE.type == "cpu":
        start_s = time.perf_counter()
        run()
        return (time.perf_counter() - start_s) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def host_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds until the call returns."""
    start = time.perf_counter()
    run()
    took = (time.perf_counter() - start) * 1e3
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return took


def run(numel: int, density: float, *, rounds: int, count: int) -> list[Row]:
    """Time all candidates in turns."""
    p = Problem(numel, density)
    check(p)
    timed = candidates(p)
    updates = many(numel, density, count)
    timed[f"adamw, many: 2 x {count} tensors"] = (
        timed["adamw fused slot 256 x 1"][0],
        lambda: cuda.adamw_(updates, SETTINGS, p.skip),
    )
    timed["copy"] = (4 * numel, lambda: p.copy.copy_(p.source))
    times: dict[str, list[float]] = {name: [] for name in timed}
    warm_up = 2 if DEVICE.type == "cuda" else 0
    for turn in range(rounds + warm_up):
        for name, (_, call) in timed.items():
            took = time_ms(call)
            if turn >= warm_up:
                times[name].append(took)
    copy_ms = statistics.median(times["copy"])
    rows: list[Row] = []
    for name, (moved, _) in timed.items():
        ms = statistics.median(times[name])
        floor_ms = copy_ms * moved / (4 * numel)
        rows.append(
            {
                "candidate": name,
                "ms": round(ms, 4),
                "min_ms": round(min(times[name]), 4),
                "floor_ms": round(floor_ms, 4),
                "of_floor": round(ms / floor_ms, 3),
                "of_copy": round(ms / copy_ms, 3),
                "numel": numel,
                "density": density,
                "rounds": rounds,
            }
        )
    call = timed[f"adamw, many: 2 x {count} tensors"][1]
    took = statistics.median(host_ms(call) for _ in range(rounds))
    rows.append({"candidate": f"host, 2 x {count} tensors", "ms": round(took, 4)})
    gradients = [update.grad_Z for update in updates]
    took = statistics.median(time_ms(lambda: _look(gradients)) for _ in range(rounds))
    rows.append({"candidate": f"find_nonfinite, 2 x {count} tensors", "ms": round(took, 4)})
    return rows


def _look(gradients: list[torch.Tensor]) -> None:
    cuda.find_nonfinite(gradients)


def _say(config: cuda.Config) -> str:
    return f"{config.way} {config.size} x {config.num_warps}"


def main() -> None:
    """Run and print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="runs of each candidate")
    parser.add_argument("--log2", type=int, default=30, help="weights, as a power of 2")
    parser.add_argument("--density", type=float, default=0.1, help="fraction kept")
    options = parser.parse_args()
    torch.manual_seed(0)
    numel, count = (2**11, 2) if options.toy else (2**options.log2, 256)
    rows = run(numel, options.density, rounds=options.rounds, count=count)
    show(rows, ["candidate", "ms", "min_ms", "floor_ms", "of_floor", "of_copy"])
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
