"""``samo bench step``: what a training step of a pruned GPT costs, in time and memory.

All contenders train the same GPT from the same initial weights, on the same tokens, with the same
loss and AdamW settings. In each round every contender is built, warmed up, timed and freed in turn.

With ``--compile`` every model is compiled in the same way: each block by itself, or forward and
loss as one graph, with or without CUDA graphs. The optimizer is never compiled.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from samo.bench.contenders import CONTENDERS, Contender
from samo.bench.rows import Row, Save, Say, Table, between, digits, reason
from samo.bench.settings import StepConfig, require
from samo.bench.timing import Clock, free, ratio, spread
from samo.errors import nearest
from samo.memory.ledger import Ledger
from samo.models.gpt import GPT
from samo.models.shapes import SHAPES, GPTConfig, ShapeName
from samo.pruning.prune import prune
from samo.utils.environment import hardware
from samo.utils.formatting import count

__all__ = []

_WARM_UP: Final = 3
_GRAPHS_WARM_UP: Final = 5
"""The first step compiles, the second records, and the third may find gradients elsewhere."""
_VOCAB_SIZE: Final = 50_304
_QUICK: Final = GPTConfig(
    num_layers=2, width=64, num_heads=2, context=32, vocab_size=256, is_checkpointed=True
)


def check(config: StepConfig) -> None:
    """Raise ConfigError for a setting out of range or an unknown contender."""
    for name in ("repeats", "batch_size", "context", "rounds"):
        value = getattr(config, name)
        require(value == "auto" or value >= 1, f"{name} must be 1 or more, got {value}")
    require(0 < config.sparsity < 1, f"sparsity must be between 0 and 1, got {config.sparsity}")
    contenders(config)


def contenders(config: StepConfig) -> list[str]:
    """Return the names that ``--only`` chooses, in the order of `CONTENDERS`."""
    wanted = [name for entry in config.only for name in entry.split(",") if name]
    for name in wanted:
        guess = nearest(name, CONTENDERS)
        known = ", ".join(CONTENDERS)
        require(name in CONTENDERS, f"unknown contender '{name}'{guess}; choose among {known}")
    return [name for name in CONTENDERS if not wanted or name in wanted]


def measure(config: StepConfig, device: torch.device, save: Save, say: Say) -> list[Row]:
    """Time the steps of every contender."""
    shape = gpt_config(config, device)
    batch = 2 if config.quick else config.batch_size
    repeats = min(config.repeats, 2) if config.quick else config.repeats
    rounds = config.rounds
    if rounds == "auto":
        rounds = 1 if config.quick or config.compile != "none" else 3
    generator = torch.Generator(device).manual_seed(1)
    size = (batch, shape.context + 1)
    tokens = torch.randint(0, shape.vocab_size, size, device=device, generator=generator)
    contest = Contest(shape, config, tokens, say)
    names = contenders(config)
    say(
        f"{count(contest.num_params)} parameters, {batch} x {shape.context} tokens; one contender "
        f"at a time, {rounds} {'round' if rounds == 1 else 'rounds'}"
    )
    parameters = {
        "shape": "quick" if config.quick else shape_name(config, device),
        "num_params": contest.num_params,
        "batch_size": batch,
        "context": shape.context,
        "sparsity": config.sparsity,
        "checkpointed": shape.is_checkpointed,
        "compile": config.compile,
        "dtype": "bfloat16",
        "rounds": rounds,
    }

    def rows() -> list[Row]:
        return [contest.row(name, parameters) for name in names]

    for number in range(rounds):
        steps = repeats // rounds + (number < repeats % rounds)
        for name in names if steps else ():
            contest.run(name, steps)
            save(rows())
    return rows()


@dataclass
class Record:
    """What was measured of one contender so far."""

    step_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    """The median step of each round."""
    update_ms: list[float] = field(default_factory=list)
    in_a_row_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    state_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    """Of the timed steps of the last round."""
    account: Ledger | None = None
    warm_up_s: float = 0.0
    """Of the first round, before which nothing was compiled."""
    compiled: dict[str, int] = field(default_factory=dict)
    failure: str | None = None


class Contest:
    """Builds contenders on equal terms, runs their steps and records them."""

    def __init__(self, shape: GPTConfig, config: StepConfig, tokens: Tensor, say: Say) -> None:
        self.records: dict[str, Record] = {}
        self.compile = config.compile
        self.warm_up = _GRAPHS_WARM_UP if config.compile == "graphs" else _WARM_UP
        self._shape = shape
        self._device = tokens.device
        self._clock = Clock(tokens.device)
        self._say = say
        self._inputs, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        model = new_model(shape, self._device)
        self.num_params = sum(param.numel() for param in model.parameters())
        # On the host, so that contenders without masks have no mask in their memory.
        self._masks = prune(model, config.sparsity).to("cpu")

    def run(self, name: str, steps: int) -> None:
        """Build one contender, time some steps and free it. A contender that failed is skipped."""
        record = self.records.setdefault(name, Record())
        if record.failure is not None:
            return
        record.losses.clear()
        self._reset()
        try:
            self._run(name, record, steps)
        except Exception as error:  # whatever it is, the other contenders continue
            record.failure = reason(error)
            self._say(f"{name}: {record.failure}")
        self._reset()

    def _run(self, name: str, record: Record, steps: int) -> None:
        before = self._memory("current")  # what a library has not freed
        contender = self._warmed_up(name, record)
        for _ in range(steps):
            self._timed_step(contender, record, before)
        in_a_row = self._steps_in_a_row(contender)
        record.in_a_row_ms.append(in_a_row)
        median = spread(record.step_ms[-steps:])["median"]
        record.round_ms.append(median)
        if self.compile != "none":
            counters = torch._dynamo.utils.counters
            record.compiled = {"compilations": counters["stats"]["unique_graphs"]}
            if self.compile == "graphs":
                record.compiled["cudagraph_skips"] = counters["inductor"]["cudagraph_skips"]
        peak = f", peak {digits(record.peak_bytes / 1e9)} GB" if record.peak_bytes else ""
        warm_up = f"warm-up {record.warm_up_s:.1f} s"
        self._say(f"{name}: {digits(median)} ms, {digits(in_a_row)} in a row{peak}; {warm_up}")

    def _warmed_up(self, name: str, record: Record) -> Contender:
        model, masks = new_model(self._shape, self._device), self._masks.to(self._device)
        contender = CONTENDERS[name](model, masks)
        mode = "reduce-overhead" if self.compile == "graphs" else None
        if self.compile != "none":
            for module in model.blocks if self.compile == "blocks" else [model]:
                module.compile(fullgraph=True, mode=mode)  # a graph break is an error
        self._clock.wait()
        start = time.perf_counter()
        for step in range(self.warm_up):
            self._gradients(contender)
            if step == self.warm_up - 1:
                record.state_bytes = contender.state_bytes()
                record.account = contender.account()
            contender.update()
            contender.keep_masks()
        self._clock.wait()
        record.warm_up_s = record.warm_up_s or time.perf_counter() - start
        if self.compile == "graphs":
            free(self._device)  # reserved memory is measured
        return contender

    def _timed_step(self, contender: Contender, record: Record, before: int) -> None:
        clock = self._clock
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            time.sleep(0.1)
        start = clock.mark()
        loss = self._gradients(contender)
        middle = clock.mark()
        contender.update()
        stop = clock.mark()
        clock.wait()
        record.peak_bytes = max(record.peak_bytes, self._memory("peak") - before)
        contender.keep_masks()
        record.losses.append(float(loss))
        record.step_ms.append(clock.ms(start, stop))
        record.update_ms.append(clock.ms(middle, stop))

    def _steps_in_a_row(self, contender: Contender) -> float:
        """Time steps without a pause, with everything that training does."""
        steps = 10 if self._device.type == "cuda" else 1
        start = self._clock.mark()
        for _ in range(steps):
            self._gradients(contender)
            contender.update()
            contender.keep_masks()
        stop = self._clock.mark()
        self._clock.wait()
        return self._clock.ms(start, stop) / steps

    def _gradients(self, contender: Contender) -> Tensor:
        if self.compile == "graphs":  # loss and gradients of the last step may be overwritten
            torch.compiler.cudagraph_mark_step_begin()
        return contender.gradients(self._inputs, self._targets)

    def _memory(self, which: str) -> int:
        """Return the current or peak memory: reserved with CUDA graphs, which keep their own."""
        if self._device.type != "cuda":
            return 0
        kind = "reserved_bytes" if self.compile == "graphs" else "allocated_bytes"
        return int(torch.cuda.memory_stats().get(f"{kind}.all.{which}", 0))

    def _reset(self) -> None:
        """Free memory, and with ``--compile`` all compiled code, its counters and CUDA graphs."""
        if self.compile != "none":
            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
        free(self._device)

    def row(self, name: str, parameters: Mapping[str, Any]) -> Row:
        """Return the row of a contender."""
        record = self.records.get(name, Record())
        if record.failure is not None or not record.round_ms:
            failure = record.failure or "not measured yet"
            return Row(name=name, parameters=parameters, failure=failure)
        median = spread(record.step_ms)["median"]
        masked = self.records.get("masked", Record())
        tokens = self._inputs.numel()
        figures: dict[str, Any] = {
            "over_masked": _ratio(record.round_ms, masked.round_ms),
            "round_ms": record.round_ms,
            "update_ms": spread(record.update_ms)["median"],
            "in_a_row_ms": spread(record.in_a_row_ms)["median"],
            "tokens_per_s": round(tokens / median * 1e3, 1),
            "tflop_per_s": float(f"{model_flops(self._shape, tokens) / median / 1e9:.5g}"),
            "peak_bytes": record.peak_bytes or None,
            "peak_over_masked": _ratio([record.peak_bytes], [masked.peak_bytes]),
            "state_bytes": record.state_bytes,
            "state_bytes_per_param": round(record.state_bytes / self.num_params, 4),
            "final_loss": record.losses[-1] if math.isfinite(record.losses[-1]) else None,
            "trained_steps": self.warm_up + len(record.losses),
            "warm_up_s": round(record.warm_up_s, 2),
            **record.compiled,
        }
        if record.account is not None:
            share = record.account.pruned
            figures |= {
                "ledger_measured_bytes": record.account.measured_bytes,
                "ledger_predicted_bytes": record.account.predicted_bytes,
                "pruned_bytes_per_param": round(sum(share.measured.values()) / share.num_params, 4),
            }
        return Row.timed(name, parameters, record.step_ms, figures)


def new_model(shape: GPTConfig, device: torch.device) -> GPT:
    """Return a bfloat16 GPT with the same weights each time, without a wider copy on the way."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return GPT(shape)
    finally:
        torch.set_default_dtype(before)


def gpt_config(config: StepConfig, device: torch.device) -> GPTConfig:
    """Return the shape to measure."""
    if config.quick:
        return _QUICK
    shape = SHAPES[shape_name(config, device)]
    return GPTConfig(
        num_layers=shape.num_layers,
        width=shape.width,
        num_heads=shape.num_heads,
        context=config.context,
        vocab_size=_VOCAB_SIZE,
        is_checkpointed=config.checkpointed,
    )


def shape_name(config: StepConfig, device: torch.device) -> ShapeName:
    """Return the chosen shape; by default the largest of three whose dense training fits."""
    if config.shape != "auto":
        return config.shape
    if device.type != "cuda":
        return "tiny"
    memory = hardware(device)["memory_bytes"]
    return "gpt3-2.7b" if memory >= 100e9 else "gpt3-760m" if memory >= 36e9 else "gpt3-125m"


def model_flops(shape: GPTConfig, tokens: int) -> float:
    """Return the floating-point operations of one step, without recomputation.

    6 for each token and each weight of blocks and head, and 12 for each token, layer, column of the
    width and token it attends to (Narayanan et al. 2021).
    """
    layers, width = shape.num_layers, shape.width
    matrices = 12 * layers * width**2 + shape.vocab_size * width
    return float(tokens * (6 * matrices + 12 * layers * width * shape.context))


def tabulate(rows: Sequence[Row]) -> Table:
    """Return the table of rows."""
    lines = [
        {
            "contender": row.name,
            "step, ms": digits(row.median),
            "p20-p80": between(row),
            "over masked": digits(found["over_masked"]),
            "in a row, ms": digits(found["in_a_row_ms"]),
            "update, ms": digits(found["update_ms"]),
            "tokens/s": count(found["tokens_per_s"]),
            "TFLOP/s": digits(found["tflop_per_s"]),
            "peak, GB": digits(found["peak_bytes"] and found["peak_bytes"] / 1e9),
            "peak over masked": digits(found["peak_over_masked"]),
            "state, B/param": digits(found["state_bytes_per_param"]),
            "loss": digits(found["final_loss"]),
            "warm-up, s": digits(found["warm_up_s"]),
        }
        for row in rows
        if (found := row.figures)
    ]
    head = tuple(lines[0]) if lines else ("contender",)
    return Table(head, [tuple(line.values()) for line in lines])


def _ratio(values: Sequence[float], masked: Sequence[float]) -> float | None:
    """Return the median over rounds of the ratio to masked training; None without it."""
    return ratio(values, masked) if masked and all([*values, *masked]) else None
