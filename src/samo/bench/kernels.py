"""``samo bench kernels``: what compress, expand and the update cost, beside the bytes they must move.

Every operation runs on one bfloat16 weight of N entries, a random fraction f of which is kept. Its
floor is the fewest bytes it can move, each input read once and each output written once, at the
bandwidth of a copy that is measured in turns with it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from samo import kernels
from samo.bench.rows import Row, Save, Say, Table, between, digits, reason
from samo.bench.settings import KernelsConfig, require
from samo.bench.timing import flusher, free, in_turns, ratio, spread
from samo.core.compress import compress_
from samo.core.optim import AdamW
from samo.mask import bitmap
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.utils.formatting import percent

__all__ = []

NOTES: Final = (
    "N bfloat16 weights in one tensor, the fraction f kept at random. Times are medians of runs in turns, "
    "with the cache flushed before each.",
    "Floor: the bytes that must move (compress 2N + N/8 + 2fN, 2fN more to fp32 and to expand from it; "
    "update 2N + N/8 + 26fN, lean 12fN instead of 26fN; dense update 40N) at the bandwidth of "
    "the copy.",
    "The dense update is torch's fused AdamW on an fp32 master: widen the gradient, step, round the weight.",
    "Linear: time per weight, over that at the largest size.",
)

_SIZES: Final = (10, 34)
_COPY: Final = "copy"
_DENSE: Final = "update, dense"
_LR: Final = 1e-4
_FILL: Final = 2**28


def floor_bytes(operation: str, numel: int, kept: int) -> int:
    """Return the fewest bytes that an operation can move."""
    once = 2 * numel + numel // 8  # a dense 16-bit tensor and the bits of the mask
    return {
        _COPY: 4 * numel,
        "compress": once + 2 * kept,
        "compress, to fp32": once + 4 * kept,
        "expand": once + 4 * kept,
        # Per kept weight the update reads 2 bytes of gradient, and reads and writes 4 of value and
        # 8 of moments; then the dense copy is written.
        "update, exact": once + 26 * kept,
        # Here 2 bytes of value, one of correction and two of moments; scales are not counted.
        "update, lean": once + 12 * kept,
        # Gradient 2 to 4, then 4 in, master 4 in and out, moments 8 in and out; master 4 to weight
        # 2.
        _DENSE: 40 * numel,
    }[operation]


def check(config: KernelsConfig) -> None:
    """Raise ConfigError for a setting out of range."""
    low, high = _SIZES
    require(config.repeats >= 1, f"repeats must be 1 or more, got {config.repeats}")
    for size in config.sizes:
        require(
            low <= size <= high,
            f"sizes are powers of 2 from {low} to {high}, got {size}; 30 stands for 2^30 weights",
        )
    for density in config.densities:
        require(
            0 < density < 1, f"densities must lie between 0 and 1, got {density}; 0.1 keeps 10 %"
        )
    require(bool(config.densities), "no densities to measure; leave them out for 0.1 and 0.2")


def measure(config: KernelsConfig, device: torch.device, save: Save, say: Say) -> list[Row]:
    """Time every operation at every size and density."""
    usual = (14, 15) if config.quick else range(26, 31) if device.type == "cuda" else range(18, 23)
    powers = config.sizes or usual
    repeats = min(config.repeats, 2) if config.quick else config.repeats
    rows: list[Row] = []
    for power in sorted({*powers, *((32,) if config.large else ())}):
        for density in config.densities:
            say(f"2^{power} weights, {percent(density)} kept")
            rows += _measure_one(2**power, density, device, repeats)
            rows = with_linearity(rows)
            save(rows)
            free(device)
    return rows


def _measure_one(numel: int, density: float, device: torch.device, repeats: int) -> list[Row]:
    """Time every operation on one weight, in turns."""
    settings = {"numel": numel, "density": density}
    rows: list[Row] = []
    try:
        problem = Problem(numel, density, device)
        calls = problem.calls()
        for name, make in (("update, lean", problem.lean_update), (_DENSE, problem.dense_update)):
            free(device)
            try:
                calls[name] = make()
            except torch.OutOfMemoryError as error:
                rows.append(Row(name=name, parameters=settings, failure=reason(error)))
        times = in_turns(calls, rounds=repeats, device=device, prepare=flusher(device))
    except torch.OutOfMemoryError as error:
        return [Row(name="all operations", parameters=settings, failure=reason(error))]
    bandwidth = floor_bytes(_COPY, numel, 0) / spread(times[_COPY])["median"]
    for name, found in times.items():
        amount = floor_bytes(name, numel, problem.mask.kept)
        median = spread(found)["median"]
        figures = {
            "kept": problem.mask.kept,
            "floor_bytes": amount,
            "floor_ms": amount / bandwidth,
            "times_floor": median * bandwidth / amount,
            "gb_per_s": amount / median / 1e6,
            "ns_per_weight": median * 1e6 / numel,
        }
        if name.startswith("update") and _DENSE in times:
            figures["against_dense"] = ratio(found, times[_DENSE])
        rounded = {
            key: value if isinstance(value, int) else float(f"{value:.5g}")
            for key, value in figures.items()
        }
        rows.append(Row.timed(name, settings, found, rounded))
    return sorted(rows, key=lambda row: row.name == _DENSE)  # the last, failed or not


class Problem:
    """One weight with everything that the operations read and write."""

    def __init__(self, numel: int, density: float, device: torch.device) -> None:
        self.device = device
        self.mask = random_mask(numel, density, device)
        self.source = _random(numel, device)
        self.target = torch.empty_like(self.source)
        self.grad_Z = _random(self.mask.kept, device)
        self.model = _OneWeight(_random(numel, device))
        self._models: list[nn.Module] = []
        self._exact = self._stepper(self.model)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return the copy, the kernels and the update."""
        chosen = kernels.choose(self.device)
        source, target, mask = self.source, self.target, self.mask
        out_Z, wide_Z = torch.empty_like(self.grad_Z), torch.empty_like(self.grad_Z).float()
        return {
            _COPY: functools.partial(target.copy_, source),
            "compress": lambda: chosen.compress_(source, mask, out_Z),
            "compress, to fp32": lambda: chosen.compress_(source, mask, wide_Z),
            "expand": lambda: chosen.expand_(wide_Z, mask, target),
            "update, exact": self._exact,
        }

    def lean_update(self) -> Callable[[], object]:
        """Return the update with 8-bit state."""
        model = _OneWeight(_random(self.mask.numel, self.device))
        return self._stepper(model, value_dtype=torch.bfloat16)

    def dense_update(self) -> Callable[[], object]:
        """Return the update of dense mixed precision, from the 16-bit gradient to the 16-bit weight."""
        master = nn.Parameter(self.source.float())
        grad = self.source.float()
        master.grad = grad
        opt = torch.optim.AdamW([master], lr=_LR, fused=True)

        def step() -> None:
            grad.copy_(self.source)
            opt.step()
            self.target.copy_(master.detach())

        return step

    def _stepper(
        self, model: nn.Module, value_dtype: torch.dtype = torch.float32
    ) -> Callable[[], object]:
        """Compress a model of this one weight and return the step of its optimizer."""
        bf16 = torch.bfloat16
        compress_(model, Masks({"weight": self.mask}), grad_dtype=bf16, value_dtype=value_dtype)
        (values,) = model.parameters()
        _ = model.weight  # makes the dense copy
        values.grad = self.grad_Z
        opt = AdamW([values], lr=_LR, state="lean" if value_dtype == bf16 else "exact")
        self._models.append(model)  # the optimizer does not keep the dense weight alive
        return opt.step


class _OneWeight(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def random_mask(numel: int, density: float, device: torch.device) -> Mask:
    """Return a mask that keeps each weight with a probability, drawn in chunks."""
    generator = torch.Generator(device).manual_seed(0)
    words = torch.empty(bitmap.num_words(numel), dtype=torch.int32, device=device)
    for start, stop in bitmap.chunks(numel):
        keep = torch.rand(stop - start, device=device, generator=generator) < density
        bitmap.pack(keep, words, start)
    return Mask((numel,), words)


def with_linearity(rows: Sequence[Row]) -> list[Row]:
    """Add to rows their time per weight over that of the same operation at the largest size."""
    largest: dict[tuple[str, float], float] = {}
    for row in sorted(rows, key=lambda row: row.parameters["numel"]):
        if row.median is not None:
            per_weight = row.median / row.parameters["numel"]
            largest[row.name, row.parameters["density"]] = per_weight
    found = []
    for row in rows:
        if row.median is not None:
            per_weight = row.median / row.parameters["numel"]
            linear = per_weight / largest[row.name, row.parameters["density"]]
            row = dataclasses.replace(row, figures={**row.figures, "linear": round(linear, 4)})
        found.append(row)
    return found


def tabulate(rows: Sequence[Row]) -> Table:
    """Return the table of rows."""
    head = ("operation", "weights", "kept", "ms", "p20-p80", "floor, ms", "over floor", "linear")
    lines = [
        (
            row.name,
            f"2^{row.parameters['numel'].bit_length() - 1}",
            percent(row.parameters["density"]),
            digits(row.median),
            between(row),
            *(digits(row.figures[key]) for key in ("floor_ms", "times_floor", "linear")),
        )
        for row in rows
        if row.median is not None
    ]
    return Table(head, lines)


def _random(numel: int, device: torch.device) -> Tensor:
    values = torch.empty(numel, dtype=torch.bfloat16, device=device)
    for part in values.split(_FILL):
        part.normal_(std=0.02)
    return values
