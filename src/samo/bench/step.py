"""``samo bench step``: what a training step of a pruned GPT costs, in time and memory.

All contenders train the same GPT from the same initial weights, on the same tokens, with the same
loss and AdamW settings. In each round every contender is built, warmed up, timed and freed in turn.

With ``--compile`` every model is compiled in the same way: each block by itself, or forward and
loss as one graph, with or without CUDA graphs. The optimizer is never compiled. For several rounds,
contenders are then built once, if they fit together and there are no CUDA graphs, and take turns
step by step, without pauses: a slow phase of the host slows them all.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from samo.bench.contenders import CONTENDERS, Contender
from samo.bench.rows import Row, Save, Say, Table, between, reason
from samo.bench.settings import StepConfig
from samo.bench.timing import elapsed_ms, free, mark, ratio, spread
from samo.errors import ConfigError, nearest
from samo.kernels.operators import launch_statically
from samo.memory.ledger import Ledger
from samo.models.gpt import GPT
from samo.models.shapes import SHAPES, GPTConfig, ShapeName
from samo.pruning.prune import prune
from samo.utils.environment import hardware
from samo.utils.formatting import count, three_digits

_WARM_UP: Final = 3
_GRAPHS_WARM_UP: Final = 5
"""The first step compiles, the second records, and the third may find gradients elsewhere."""
_WARM_AGAIN: Final = 2
"""After other contenders have had their turn."""
_PARTS: Final = 4
"""Contenders that take turns also do so with their steps in a row, in so many parts."""
_VOCAB_SIZE: Final = 50_304
_QUICK: Final = GPTConfig(
    num_layers=2, width=64, num_heads=2, context=32, vocab_size=256, is_checkpointed=True
)


def contenders(config: StepConfig) -> list[str]:
    """Return the names that ``--only`` chooses, in the order of `CONTENDERS`."""
    wanted = [name for entry in config.only for name in entry.split(",") if name]
    for name in wanted:
        if name not in CONTENDERS:
            guess, known = nearest(name, CONTENDERS), ", ".join(CONTENDERS)
            raise ConfigError(f"unknown contender '{name}'{guess}; choose among {known}")
    return [name for name in CONTENDERS if not wanted or name in wanted]


def measure(config: StepConfig, device: torch.device, save: Save, say: Say) -> list[Row]:
    """Time the steps of every contender."""
    name, shape = ("quick", _QUICK) if config.quick else gpt_config(config, device)
    batch = 2 if config.quick else config.batch_size
    repeats = min(config.repeats, 2) if config.quick else config.repeats
    rounds = config.rounds
    if rounds == "auto":
        rounds = 1 if config.quick or config.compile != "none" else 3
    generator = torch.Generator(device).manual_seed(1)
    size = (batch, shape.context + 1)
    tokens = torch.randint(0, shape.vocab_size, size, device=device, generator=generator)
    takes_turns = rounds > 1 and config.compile in ("blocks", "model")
    contest = Contest(shape, config, tokens, say)
    names = contenders(config)
    how = "contenders take turns" if takes_turns else "one contender at a time"
    say(
        f"{count(contest.num_params)} parameters, {batch} x {shape.context} tokens; {how}, "
        f"{rounds} {'round' if rounds == 1 else 'rounds'}"
    )
    parameters = {
        "shape": name,
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
        if not steps:
            break
        takes_turns = takes_turns and contest.run_in_turns(names, steps)
        for name in () if takes_turns else names:
            contest.run(name, steps)
            save(rows())
        if takes_turns:
            save(rows())
    return rows()


@dataclass
class Round:
    """What was measured of one contender in one round."""

    state_bytes: int
    account: Ledger | None
    warm_up_s: float
    step_ms: list[float] = field(default_factory=list)
    update_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    in_a_row_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    compiled: dict[str, int] = field(default_factory=dict)
    is_in_turns: bool = False

    @property
    def median_ms(self) -> float:
        return spread(self.step_ms)["median"]


class Contest:
    """Builds contenders on equal terms, runs their steps and records them."""

    def __init__(self, shape: GPTConfig, config: StepConfig, tokens: Tensor, say: Say) -> None:
        self.rounds: dict[str, list[Round]] = {}
        self.failures: dict[str, str] = {}
        self.compile = config.compile
        # Those that take turns: each with its round after the warm-up, and its own bytes.
        self._kept: dict[str, tuple[Contender, Round, int]] = {}
        self.warm_up = _GRAPHS_WARM_UP if config.compile == "graphs" else _WARM_UP
        self._shape, self._device, self._say = shape, tokens.device, say
        self._inputs, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        model = new_model(shape, self._device)
        self.num_params = sum(param.numel() for param in model.parameters())
        # On the host, so that contenders without masks have no mask in their memory.
        self._masks = prune(model, config.sparsity).to("cpu")

    def run(self, name: str, steps: int) -> None:
        """Build a contender and time some steps of it. One that failed is skipped."""
        if name in self.failures:
            return
        self._reset()
        try:
            self._run(name, steps)
        except Exception as error:  # whatever it is, the other contenders continue
            self.failures[name] = reason(error)  # and not the error, whose frames hold tensors
            self._say(f"{name}: {self.failures[name]}")
        self._reset()

    def _run(self, name: str, steps: int) -> None:
        counters = torch._dynamo.utils.counters
        before = self._memory("current")
        contender, found = self._warmed_up(name)
        own = self._memory("current") - before
        for _ in range(steps):
            self._timed_step(contender, found, own)
        if self.compile != "none":
            found.compiled["compilations"] = counters["stats"]["unique_graphs"]
        if self.compile == "graphs":
            found.compiled["cudagraph_skips"] = counters["inductor"]["cudagraph_skips"]
        found.in_a_row_ms.append(self._step_in_a_row(contender, found.median_ms))
        self._record(name, found)

    def run_in_turns(self, names: Sequence[str], steps: int) -> bool:
        """Time steps of all contenders in turns, built once; return whether that was possible."""
        self._reset()
        try:
            # All have graphs of the same code.
            with torch._dynamo.config.patch(recompile_limit=64):
                self._run_in_turns(names, steps)
        except Exception as error:  # out of memory, perhaps, whatever it says
            self._say(f"not in turns: {reason(error)}")
            self._kept.clear()
        self._reset()
        return bool(self._kept)

    def _run_in_turns(self, names: Sequence[str], steps: int) -> None:
        retries = self._num_retries()
        for name in names:
            if name not in self._kept:
                before = self._memory("current")
                contender, found = self._warmed_up(name)
                found.is_in_turns = True
                self._kept[name] = contender, found, self._memory("current") - before
        started = {}
        for name, (contender, found, _) in self._kept.items():
            started[name] = replace(found, step_ms=[], update_ms=[], losses=[], in_a_row_ms=[])
            for _ in range(_WARM_AGAIN):
                self._untimed_step(contender)
        for _ in range(steps):
            for name, (contender, _, own) in self._kept.items():
                self._timed_step(contender, started[name], own)
        if self._num_retries() > retries:
            raise RuntimeError("allocations had to wait for memory of other contenders")
        for _ in range(_PARTS):
            for name, (contender, _, _) in self._kept.items():
                found = started[name]
                found.in_a_row_ms.append(self._step_in_a_row(contender, found.median_ms, _PARTS))
        for name, found in started.items():
            self._record(name, found)

    def _record(self, name: str, found: Round) -> None:
        self.rounds.setdefault(name, []).append(found)
        in_a_row = spread(found.in_a_row_ms)["median"]
        times = f"{three_digits(found.median_ms)} ms, {three_digits(in_a_row)} in a row"
        peak = f", peak {three_digits(found.peak_bytes / 1e9)} GB" if found.peak_bytes else ""
        self._say(f"{name}: {times}{peak}; warm-up {found.warm_up_s:.1f} s")

    def _num_retries(self) -> int:
        """Return how often an allocation failed until cached memory was freed."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))

    def _warmed_up(self, name: str) -> tuple[Contender, Round]:
        model, masks = new_model(self._shape, self._device), self._masks.to(self._device)
        contender = CONTENDERS[name](model, masks)
        if self.compile != "none":
            launch_statically()
        if self.compile == "blocks":
            for block in model.blocks:
                block.compile(fullgraph=True)  # a graph break is an error
        elif self.compile == "model":
            model.compile(fullgraph=True)
        elif self.compile == "graphs":
            model.compile(fullgraph=True, mode="reduce-overhead")
        start = mark(self._device)
        for _ in range(self.warm_up - 1):
            self._untimed_step(contender)
        self._gradients(contender)
        state_bytes, account = contender.state_bytes(), contender.account()
        contender.update()
        contender.keep_masks()
        seconds = elapsed_ms(start, mark(self._device)) / 1e3
        if self.compile == "graphs":
            free(self._device)  # reserved memory is measured
        return contender, Round(state_bytes, account, seconds)

    def _untimed_step(self, contender: Contender) -> None:
        self._gradients(contender)
        contender.update()
        contender.keep_masks()

    def _timed_step(self, contender: Contender, found: Round, own: int) -> None:
        others = self._memory("current") - own  # and what a library has not freed
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            if not found.is_in_turns:  # else it slows the host down, whose time is measured
                time.sleep(0.1)
        start = mark(self._device)
        loss = self._gradients(contender)
        middle = mark(self._device)
        contender.update()
        stop = mark(self._device)
        found.step_ms.append(elapsed_ms(start, stop))
        found.update_ms.append(elapsed_ms(middle, stop))
        found.peak_bytes = max(found.peak_bytes, self._memory("peak") - others)
        contender.keep_masks()
        found.losses.append(float(loss))

    def _step_in_a_row(self, contender: Contender, step_ms: float, parts: int = 1) -> float:
        """Time steps that follow each other, as in training, for about a second in all parts."""
        steps = math.ceil(max(10, 1e3 / step_ms) / parts) if self._device.type == "cuda" else 1
        start = mark(self._device)
        for _ in range(steps):
            self._gradients(contender)
            contender.update()
        return elapsed_ms(start, mark(self._device)) / steps

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
        """Free memory, and with ``--compile`` all compiled code, its counters and CUDA graphs.

        What belongs to contenders that take turns stays.
        """
        if self.compile != "none" and not self._kept:
            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
        free(self._device)

    def row(self, name: str, parameters: Mapping[str, Any]) -> Row:
        """Return the row of a contender."""
        rounds = self.rounds.get(name)
        failure = self.failures.get(name) or ("" if rounds else "not measured yet")
        if failure or not rounds:
            return Row(name=name, parameters=parameters, failure=failure)
        step_ms = [ms for each in rounds for ms in each.step_ms]
        median, first, last = spread(step_ms)["median"], rounds[0], rounds[-1]
        round_ms = [each.median_ms for each in rounds]
        in_a_row = [ms for each in rounds for ms in each.in_a_row_ms]

        def units(found: Sequence[Round]) -> list[float]:  # that saw the same machine
            return [ms for each in found for ms in (each.step_ms if in_turns else [each.median_ms])]

        peak = max(each.peak_bytes for each in rounds)
        masked = self.rounds.get("masked", [])
        in_turns = all(each.is_in_turns for each in (*rounds, *masked))
        masked_peak = max((each.peak_bytes for each in masked), default=0)
        tokens = self._inputs.numel()
        figures: dict[str, Any] = {
            "over_masked": ratio(units(rounds), units(masked)) if masked else None,
            "round_ms": round_ms,
            "update_ms": spread([ms for each in rounds for ms in each.update_ms])["median"],
            "in_a_row_ms": spread(in_a_row)["median"],
            "in_a_row_over_masked": (
                ratio(in_a_row, [ms for each in masked for ms in each.in_a_row_ms])
                if masked
                else None
            ),
            "tokens_per_s": round(tokens / median * 1e3, 1),
            "tflop_per_s": float(f"{model_flops(self._shape, tokens) / median / 1e9:.5g}"),
            "peak_bytes": peak or None,
            "peak_over_masked": ratio([peak], [masked_peak]) if peak and masked_peak else None,
            "state_bytes": last.state_bytes,
            "state_bytes_per_param": round(last.state_bytes / self.num_params, 4),
            # Of the first round: later ones may go on from there.
            "final_loss": first.losses[-1] if math.isfinite(first.losses[-1]) else None,
            "trained_steps": self.warm_up + _WARM_AGAIN * first.is_in_turns + len(first.losses),
            # With what others have compiled, it means little.
            "warm_up_s": None if last.is_in_turns else round(first.warm_up_s, 2),
            **last.compiled,
        }
        if last.account is not None:
            share = last.account.pruned
            figures |= {
                "ledger_measured_bytes": last.account.measured_bytes,
                "ledger_predicted_bytes": last.account.predicted_bytes,
                "pruned_bytes_per_param": round(sum(share.measured.values()) / share.num_params, 4),
            }
        return Row.timed(step_ms, name=name, parameters=parameters, figures=figures)


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


def gpt_config(config: StepConfig, device: torch.device) -> tuple[str, GPTConfig]:
    """Return the model's name and shape; auto: the largest of three whose dense training fits."""
    memory = hardware(device)["memory_bytes"] if device.type == "cuda" else 0
    needs: dict[ShapeName, float] = {"gpt3-2.7b": 100e9, "gpt3-760m": 36e9, "gpt3-125m": 1}
    fitting: list[ShapeName] = [shape for shape, least in needs.items() if memory >= least]
    name = config.shape if config.shape != "auto" else [*fitting, "tiny"][0]
    shape = SHAPES[name]
    return name, GPTConfig(
        num_layers=shape.num_layers,
        width=shape.width,
        num_heads=shape.num_heads,
        context=config.context,
        vocab_size=_VOCAB_SIZE,
        is_checkpointed=config.checkpointed,
    )


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
    columns = {
        "over masked": "over_masked",
        "in a row, ms": "in_a_row_ms",
        "over masked, in a row": "in_a_row_over_masked",
        "update, ms": "update_ms",
        "tokens/s": "tokens_per_s",
        "TFLOP/s": "tflop_per_s",
        "peak, GB": "peak_bytes",
        "peak over masked": "peak_over_masked",
        "state, B/param": "state_bytes_per_param",
        "loss": "final_loss",
        "warm-up, s": "warm_up_s",
    }

    def cell(row: Row, key: str) -> str:
        value = row.figures.get(key)
        return three_digits(value / 1e9 if value and key == "peak_bytes" else value)

    lines = [
        (
            row.name,
            three_digits(row.median),
            between(row),
            *(cell(row, key) for key in columns.values()),
        )
        for row in rows
        if row.median is not None
    ]
    return Table(("contender", "step, ms", "p20-p80", *columns), lines)
