"""``samo bench kernels``: the cost of compress, expand and the update, beside the bytes they move.

Every operation runs on one bfloat16 weight of N entries, a random fraction f of which is kept. Its
floor is the fewest bytes it can move, each input read once and each output written once, at the
bandwidth of a copy that is measured in turns with it.
"""

import dataclasses
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

_COPY: Final = "copy"
_DENSE: Final = "update, dense"
_LR: Final = 1e-4


def floor_bytes(operation: str, numel: int, kept: int) -> int:
    """Return the fewest bytes that an operation can move."""
    once = 2 * numel + numel // 8  # a dense 16-bit tensor and the bits of the mask
    return {
        _COPY: 4 * numel,
        "compress": once + 2 * kept,
        "compress, to fp32": once + 4 * kept,
        "expand": once + 4 * kept,
        # Per kept weight: 2 bytes of gradient, 4 of value and 8 of moments in and out.
        "update, exact": once + 26 * kept,
        # 2 bytes of value, one of correction and two of moments; scales are not counted.
        "update, lean": once + 12 * kept,
        # Gradient 2 to 4, then 4 in, master 4 and moments 8 in and out; master 4 to weight 2.
        _DENSE: 40 * numel,
    }[operation]


def check(config: KernelsConfig) -> None:
    """Raise ConfigError for a setting out of range."""
    require(config.repeats >= 1, f"repeats must be 1 or more, got {config.repeats}")
    for size in config.sizes:
        require(10 <= size <= 34, f"sizes are powers of 2 from 10 to 34, got {size}")
    require(bool(config.densities), "no densities to measure; leave them out for 0.1 and 0.2")
    for density in config.densities:
        require(0 < density < 1, f"densities must be between 0 and 1, got {density}")


def measure(config: KernelsConfig, device: torch.device, save: Save, say: Say) -> list[Row]:
    """Time every operation at every size and density."""
    usual = (14, 15) if config.quick else range(26, 31) if device.type == "cuda" else range(18, 23)
    repeats = min(config.repeats, 2) if config.quick else config.repeats
    rows: list[Row] = []
    for power in sorted(set(config.sizes or usual)):
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
        amount, median = floor_bytes(name, numel, problem.mask.kept), spread(found)["median"]
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
        self.models: list[nn.Module] = []
        self._exact = self._update(torch.float32)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return the copy, the kernels and the update."""
        chosen = kernels.choose(self.device)
        source, target, mask = self.source, self.target, self.mask
        out_Z, wide_Z = torch.empty_like(self.grad_Z), torch.empty_like(self.grad_Z).float()
        return {
            _COPY: lambda: target.copy_(source),
            "compress": lambda: chosen.compress_(source, mask, out_Z),
            "compress, to fp32": lambda: chosen.compress_(source, mask, wide_Z),
            "expand": lambda: chosen.expand_(wide_Z, mask, target),
            "update, exact": self._exact,
        }

    def lean_update(self) -> Callable[[], object]:
        """Return the update with 8-bit state."""
        return self._update(torch.bfloat16)

    def dense_update(self) -> Callable[[], object]:
        """Return the dense update, from the 16-bit gradient to the 16-bit weight."""
        master, grad = nn.Parameter(self.source.float()), self.source.float()
        master.grad = grad
        opt = torch.optim.AdamW([master], lr=_LR, fused=True)

        def step() -> None:
            grad.copy_(self.source)
            opt.step()
            self.target.copy_(master.detach())

        return step

    def _update(self, value_dtype: torch.dtype) -> Callable[[], object]:
        """Compress a model of one weight, and return the step of its optimizer."""
        model, bf16 = nn.Module(), torch.bfloat16
        model.weight = nn.Parameter(_random(self.mask.numel, self.device))
        compress_(model, Masks({"weight": self.mask}), grad_dtype=bf16, value_dtype=value_dtype)
        (values,) = model.parameters()
        _ = model.weight  # makes the dense copy
        values.grad = self.grad_Z
        self.models.append(model)  # the optimizer does not keep the dense weight alive
        return AdamW([values], lr=_LR, state="lean" if value_dtype == bf16 else "exact").step


def random_mask(numel: int, density: float, device: torch.device) -> Mask:
    """Return a mask that keeps each weight with a probability, drawn in chunks."""
    generator = torch.Generator(device).manual_seed(0)
    words = torch.empty(bitmap.num_words(numel), dtype=torch.int32, device=device)
    for start, stop in bitmap.chunks(numel):
        keep = torch.rand(stop - start, device=device, generator=generator) < density
        bitmap.pack(keep, words, start)
    return Mask((numel,), words)


def _random(numel: int, device: torch.device) -> Tensor:
    values = torch.empty(numel, dtype=torch.bfloat16, device=device)
    for part in values.split(2**28):
        part.normal_(std=0.02)
    return values


def with_linearity(rows: Sequence[Row]) -> list[Row]:
    """Add to rows their time per weight over that of the same operation at the largest size."""
    largest: dict[tuple[str, float], float] = {}
    found = []
    for row in sorted(rows, key=lambda row: -row.parameters["numel"]):
        if row.median is not None:
            per_weight = row.median / row.parameters["numel"]
            base = largest.setdefault((row.name, row.parameters["density"]), per_weight)
            linear = round(per_weight / base, 4)
            row = dataclasses.replace(row, figures={**row.figures, "linear": linear})
        found.append(row)
    return sorted(found, key=lambda row: row.parameters["numel"])


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
