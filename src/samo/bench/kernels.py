"""``samo bench kernels``: the cost of compress, expand and the update, beside the bytes they move.

Every operation runs on one bfloat16 weight of N entries, a random fraction f of which is kept. Its
floor is the fewest bytes it can move, each input read once and each output written once, at the
bandwidth of a copy that is measured in turns with it.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from samo import kernels
from samo.bench.rows import Row, Save, Say, Table, between, reason
from samo.bench.settings import KernelsConfig
from samo.bench.timing import flusher, free, in_turns, ratio, spread
from samo.core.adamw import AdamW
from samo.core.compress import compress_
from samo.mask import bitmap
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.utils.formatting import percent, three_digits

_DENSE: Final = "update, dense"
_LR: Final = 1e-4

_ONCE: Final = 2 + 1 / 8  # a dense 16-bit weight and its bit of the mask
FLOORS: Final = {
    "copy": (4, 0),
    "compress": (_ONCE, 2),
    "compress, to fp32": (_ONCE, 4),
    "expand": (_ONCE, 4),
    "update, exact": (_ONCE, 26),  # 2 of gradient, 4 of value and 8 of moments in and out
    "update, lean": (_ONCE, 12),  # 2 of value, 1 of correction, 2 of moments; no scales
    # Gradient 2 to 4, then 4 in, master 4 and moments 8 in and out; master 4 to weight 2.
    _DENSE: (40, 0),
}
"""The fewest bytes that each operation can move: for each weight, and for each kept one."""


def floor_bytes(operation: str, numel: int, kept: int) -> int:
    """Return the fewest bytes that an operation can move."""
    by_weight, by_kept = FLOORS[operation]
    return int(by_weight * numel) + by_kept * kept


def measure(config: KernelsConfig, device: torch.device, save: Save, say: Say) -> list[Row]:
    """Time every operation at every size and density."""
    usual = (14, 15) if config.quick else range(26, 31) if device.type == "cuda" else range(18, 23)
    repeats = min(config.repeats, 2) if config.quick else config.repeats
    rows: list[Row] = []
    for power in sorted(set(config.sizes or usual)):
        for density in config.densities:
            say(f"2^{power} weights, {percent(density)} kept")
            rows += _measure_one(2**power, density, device, repeats)
            save(rows)
            free(device)
    return rows


def _measure_one(numel: int, density: float, device: torch.device, repeats: int) -> list[Row]:
    """Time every operation on one weight, in turns."""
    settings = {"numel": numel, "density": density}
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], object]] = {}
    try:
        problem = Problem(numel, density, device)
        for name in FLOORS:
            try:
                calls[name] = problem.operation(name)
            except torch.OutOfMemoryError as error:
                rows[name] = Row(name=name, parameters=settings, failure=reason(error))
                free(device)
        times = in_turns(calls, rounds=repeats, device=device, prepare=flusher(device))
    except torch.OutOfMemoryError as error:
        return [Row(name="all operations", parameters=settings, failure=reason(error))]
    kept = problem.mask.kept
    bandwidth = floor_bytes("copy", numel, kept) / spread(times["copy"])["median"]
    for name, found in times.items():
        amount, median = floor_bytes(name, numel, kept), spread(found)["median"]
        figures = {
            "floor_ms": amount / bandwidth,
            "times_floor": median * bandwidth / amount,
            "gb_per_s": amount / median / 1e6,
            "ns_per_weight": median * 1e6 / numel,
        }
        if name.startswith("update") and _DENSE in times:
            figures["against_dense"] = ratio(found, times[_DENSE])
        rounded = {key: float(f"{value:.5g}") for key, value in figures.items()}
        counts = {"kept": kept, "floor_bytes": amount}
        rows[name] = Row.timed(found, name=name, parameters=settings, figures=counts | rounded)
    return [rows[name] for name in FLOORS]


class Problem:
    """One weight with everything that the operations read and write."""

    def __init__(self, numel: int, density: float, device: torch.device) -> None:
        self.mask = random_mask(numel, density, device)
        self.source = _random(numel, device)
        self.target = torch.empty_like(self.source)
        self.grad_Z = _random(self.mask.kept, device)
        self.models: list[nn.Module] = []

    def operation(self, name: str) -> Callable[[], object]:
        """Return a function that does one operation once, with all that it needs allocated."""
        source, target, mask = self.source, self.target, self.mask
        if name == "copy":
            return lambda: target.copy_(source)
        if name.startswith("update"):
            step = self._dense_step() if name == _DENSE else self._step(name.endswith("lean"))
            step()
            return step
        chosen, out_Z = kernels.choose(source.device), torch.empty_like(self.grad_Z)
        if name != "compress":
            out_Z = out_Z.float()
        if name == "expand":
            return lambda: chosen.expand_(out_Z, mask, target)
        return lambda: chosen.compress_(source, mask, out_Z)

    def _dense_step(self) -> Callable[[], object]:
        """Return the dense update, from the 16-bit gradient to the 16-bit weight."""
        master, grad = nn.Parameter(self.source.float()), self.source.float()
        master.grad = grad
        opt = torch.optim.AdamW([master], lr=_LR, fused=True)

        def step() -> None:
            grad.copy_(self.source)
            opt.step()
            self.target.copy_(master.detach())

        return step

    def _step(self, is_lean: bool) -> Callable[[], object]:
        """Compress a model of one weight, and return the step of its optimizer."""
        model, bf16 = nn.Module(), torch.bfloat16
        model.weight = nn.Parameter(_random(self.mask.numel, self.grad_Z.device))
        masks = Masks({"weight": self.mask})
        compress_(model, masks, grad_dtype=bf16, value_dtype=bf16 if is_lean else torch.float32)
        (values,) = model.parameters()
        _ = model.weight  # makes the dense copy
        values.grad = self.grad_Z
        self.models.append(model)  # the optimizer does not keep the dense weight alive
        return AdamW([values], lr=_LR, state="lean" if is_lean else "exact").step


def random_mask(numel: int, density: float, device: torch.device) -> Mask:
    """Return a mask that keeps each weight with a probability, drawn in chunks."""
    generator = torch.Generator(device).manual_seed(0)
    words = torch.empty(bitmap.num_words(numel), dtype=torch.int32, device=device)
    for start, stop in bitmap.chunks(numel):
        keep = torch.rand(stop - start, device=device, generator=generator) < density
        bitmap.pack(keep, words, start)
    return Mask((numel,), words)


def _random(numel: int, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=torch.bfloat16, device=device).normal_(std=0.02)


def tabulate(rows: Sequence[Row]) -> Table:
    """Return the table of rows."""
    head = ("operation", "weights", "kept", "ms", "p20-p80", "floor, ms", "over floor", "linear")
    measured = [row for row in rows if row.median is not None]
    largest = {(row.name, row.parameters["density"]): _per_weight(row) for row in measured}
    lines = [
        (
            row.name,
            f"2^{row.parameters['numel'].bit_length() - 1}",
            percent(row.parameters["density"]),
            three_digits(row.median),
            between(row),
            *(three_digits(row.figures[key]) for key in ("floor_ms", "times_floor")),
            three_digits(_per_weight(row) / largest[row.name, row.parameters["density"]]),
        )
        for row in measured
    ]
    return Table(head, lines)


def _per_weight(row: Row) -> float:
    return float(row.figures["ns_per_weight"])
