"""What does a training step of a pruned GPT cost, in time and memory, beside what people would use instead?

Every contender trains the same GPT, from the same first weights, on the same tokens, with the same loss and
the same AdamW settings. Where memory allows they stand beside each other and take turns, a step each;
otherwise, and where they are compiled, each is built, warmed up, timed and thrown away, all of them once in
every round.
"""

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from samo.bench.compiling import begin_step, compile_, counts, forget, has_graphs
from samo.bench.contenders import Contender, bytes_a_parameter, maker
from samo.bench.rows import Row, Save, Say, Table, between, digits, reason
from samo.bench.settings import Compile, StepConfig, contenders
from samo.bench.timing import Clock, free, ratio, spread
from samo.memory.ledger import Ledger
from samo.models.gpt import GPT
from samo.models.shapes import SHAPES, GPTConfig, ShapeName
from samo.pruning.prune import prune
from samo.utils.environment import hardware
from samo.utils.formatting import NOTHING, count

__all__ = []

NOTES: Final = (
    "Step: forward, backward and update, median. Update: the last of the three; in backward with gradient "
    "release. Before each step all rest for the same time: a GPU at its power limit computes the slower "
    "the less it has rested.",
    "In a row: the time of a step when 10 follow each other without a rest, masks kept after each of them.",
    "TFLOP/s are those of the model: 6 for each weight of blocks and head and token, and attention; what "
    "checkpointing computes again is not counted.",
    "Over masked: step and peak over those of masked dense training, compiled in the same way; medians over "
    "rounds.",
    "Peak: most memory allocated during a step; with CUDA graphs, which keep theirs: reserved. State: weights, "
    "gradients, optimizer state and masks between backward and update, over all parameters.",
    "Warm-up: the first steps, in which torch compiles and records CUDA graphs.",
    "All but dense and autocast train the pruned weights. Dense optimizers set pruned weights back to 0 "
    "after each step, which only 'in a row' counts.",
    "The tokens are one random batch, learnt by heart: the loss shows that all train, not how well.",
)

_WARM_UP: Final = 3
_GRAPHS_WARM_UP: Final = 5
"""The first step compiles, the second records, and the third may find gradients elsewhere."""
_IN_A_ROW: Final = 10
_REST_S: Final = 0.1
_ROUNDS_ALONE: Final = 3
_ROOM: Final = 0.25
"""Share of the device's memory that is left for activations when contenders stand beside each other."""
_QUICK: Final = GPTConfig(
    num_layers=2, width=64, num_heads=2, context=32, vocab_size=256, is_checkpointed=True
)


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
    own_bytes: int = 0
    """What its model and optimizer take of the device's memory between steps."""
    losses: list[float] = field(default_factory=list)
    """Of the timed steps since it was built last."""
    account: Ledger | None = None
    warm_up_s: float = 0.0
    """Of the first round, in which nothing had been compiled before."""
    counts: dict[str, int] = field(default_factory=dict)
    failure: str | None = None


def measure(config: StepConfig, device: torch.device, save: Save, say: Say) -> list[Row]:
    """Time the steps of every contender."""
    shape = gpt_config(config, device)
    batch = 2 if config.quick else config.batch_size
    repeats = min(config.repeats, 2) if config.quick else config.repeats
    generator = torch.Generator(device).manual_seed(1)
    size = (batch, shape.context + 1)
    tokens = torch.randint(0, shape.vocab_size, size, device=device, generator=generator)
    contest = Contest(shape, config.sparsity, tokens, device, say, config.compile)
    names = contenders(config)
    # What is compiled for one contender is forgotten before the next.
    fits = config.compile == "none" and _fits(names, contest.num_params, device)
    rounds = config.rounds
    if rounds == "auto":
        rounds = 1 if fits or config.compile != "none" else _ROUNDS_ALONE
    how = "in turns" if fits else "one at a time in memory"
    how += f", {rounds} rounds" * (rounds > 1)
    say(f"{count(contest.num_params)} parameters, {batch} x {shape.context} tokens; {how}")

    def rows() -> list[Row]:
        parameters = {
            "shape": "quick" if config.quick else shape_name(config, device),
            "num_params": contest.num_params,
            "batch_size": batch,
            "context": shape.context,
            "sparsity": config.sparsity,
            "checkpointed": shape.is_checkpointed,
            "compile": config.compile,
            "dtype": "bfloat16",
            "order": how,
        }
        flops = model_flops(shape, batch * shape.context)
        return [_row(name, contest, parameters, batch * shape.context, flops) for name in names]

    for steps in _portions(repeats, rounds):
        if fits:
            contest.together(names, steps)
            save(rows())
        else:
            for name in names:
                contest.alone(name, steps)
                save(rows())
    return rows()


class Contest:
    """Builds contenders on equal terms, runs their steps and records them."""

    def __init__(
        self,
        shape: GPTConfig,
        sparsity: float,
        tokens: Tensor,
        device: torch.device,
        say: Say,
        how: Compile = "none",
    ) -> None:
        self.records: dict[str, Record] = {}
        self.how = how
        self._shape = shape
        self._device = device
        self._say = say
        self._clock = Clock(device)
        self._inputs, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        model = new_model(shape, device)
        self.num_params = sum(param.numel() for param in model.parameters())
        # On the host, so that contenders without masks have no mask in their memory.
        self._masks = prune(model, sparsity).to("cpu")

    def together(self, names: Sequence[str], repeats: int) -> None:
        """Build all contenders and let them take turns."""
        sound = [name for name in names if self.records.get(name, Record()).failure is None]
        built = {name: made for name in sound if (made := self._build(name)) is not None}
        order = random.Random(0)
        for _ in range(repeats):
            for name in order.sample(list(built), len(built)):
                if not self._step(name, built[name]):
                    del built[name]
                    free(self._device)
        for name, contender in built.items():
            self._steps_in_a_row(name, contender)
            self._end_round(name, repeats)
        built.clear()
        free(self._device)

    def alone(self, name: str, steps: int) -> None:
        """Build one contender, take some steps and throw it away."""
        if self.records.get(name, Record()).failure is None:
            if self.how != "none":
                forget()
            contender = self._build(name)
            if contender is not None:
                for _ in range(steps):
                    if not self._step(name, contender):
                        break
                else:
                    self._steps_in_a_row(name, contender)
                    self._end_round(name, steps)
            del contender
            self.records[name].own_bytes = 0
            if self.how != "none":
                forget()  # graphs hold memory
            free(self._device)

    def _build(self, name: str) -> Contender | None:
        """Return a contender that has taken its first steps, or None if it cannot."""
        record = self.records.setdefault(name, Record())
        record.losses.clear()
        before = self._held()
        try:
            contender: Contender | None = self._warmed_up(name)
        except Exception as error:  # a peer may fail in its own way, and the others go on
            self._fail(name, error)
            contender = None
        if contender is None or has_graphs(self.how):
            free(self._device)  # else what it has cached stays, as it does in training
        record.own_bytes = 0 if contender is None else self._held() - before
        return contender

    def _warmed_up(self, name: str) -> Contender:
        record = self.records[name]
        model, masks = new_model(self._shape, self._device), self._masks.to(self._device)
        contender = maker(name)(model, masks)
        compile_(model, self.how)
        self._clock.wait()
        start = time.perf_counter()
        steps = _warm_up_steps(self.how)
        for step in range(steps):
            self._gradients(contender)
            if step == steps - 1:
                record.state_bytes = contender.state_bytes()
                record.account = contender.account()
            contender.update()
            contender.keep_masks()
        self._clock.wait()
        record.warm_up_s = record.warm_up_s or time.perf_counter() - start
        return contender

    def _gradients(self, contender: Contender) -> Tensor:
        begin_step(self.how)
        return contender.gradients(self._inputs, self._targets)

    def _step(self, name: str, contender: Contender) -> bool:
        """Time a step and return whether it could be taken."""
        record = self.records[name]
        clock, is_cuda = self._clock, self._device.type == "cuda"
        # What else is allocated: other contenders, and what a library has not let go of.
        others = self._held() - record.own_bytes
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
            time.sleep(_REST_S)
        try:
            start = clock.mark()
            loss = self._gradients(contender)
            middle = clock.mark()
            contender.update()
            stop = clock.mark()
            clock.wait()
            if is_cuda:
                record.peak_bytes = max(record.peak_bytes, self._highest() - others)
            contender.keep_masks()
            record.losses.append(float(loss))
        except Exception as error:  # as above
            self._fail(name, error)
            record.own_bytes = 0
            return False
        record.step_ms.append(clock.ms(start, stop))
        record.update_ms.append(clock.ms(middle, stop))
        return True

    def _steps_in_a_row(self, name: str, contender: Contender) -> None:
        """Time steps as training takes them: one after the other, with all that belongs to them."""
        steps = _IN_A_ROW if self._device.type == "cuda" else 1
        clock = self._clock
        try:
            start = clock.mark()
            for _ in range(steps):
                self._gradients(contender)
                contender.update()
                contender.keep_masks()
            stop = clock.mark()
            clock.wait()
        except Exception as error:  # as above
            self._fail(name, error)
            return
        self.records[name].in_a_row_ms.append(clock.ms(start, stop) / steps)

    def _end_round(self, name: str, steps: int) -> None:
        """Note what the steps of a round were like, and say so."""
        record = self.records[name]
        if record.failure is None:
            found = spread(record.step_ms[-steps:])
            record.round_ms.append(found["median"])
            record.counts = counts(self.how)
            peak = f", peak {_shown(record.peak_bytes)}" * bool(record.peak_bytes)
            in_a_row = digits(record.in_a_row_ms[-1])
            self._say(
                f"{name}: {digits(found['median'])} ms, {in_a_row} in a row{peak}; warm-up "
                f"{record.warm_up_s:.1f} s"
            )

    def _held(self) -> int:
        """Return the memory that is in use; with CUDA graphs all that is not given back."""
        if self._device.type != "cuda":
            return 0
        return (
            torch.cuda.memory_reserved() if has_graphs(self.how) else torch.cuda.memory_allocated()
        )

    def _highest(self) -> int:
        """Return the highest value of `_held` since it was reset."""
        if has_graphs(self.how):  # what a replay writes to is not allocated then
            return torch.cuda.max_memory_reserved()
        return torch.cuda.max_memory_allocated()

    def _fail(self, name: str, error: Exception) -> None:
        self.records[name].failure = reason(error)
        self._say(f"{name}: {reason(error)}")


def new_model(shape: GPTConfig, device: torch.device) -> GPT:
    """Return a bfloat16 GPT with the same weights each time, made where it will be, with no wider copy."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return GPT(shape)
    finally:
        torch.set_default_dtype(before)


def gpt_config(config: StepConfig, device: torch.device) -> GPTConfig:
    """Return the shape to measure.

    Example:
        >>> import torch
        >>> from samo.bench.settings import StepConfig
        >>> from samo.bench.step import gpt_config
        >>> gpt_config(StepConfig(shape="gpt3-13b"), torch.device("cpu")).width
        5120
    """
    if config.quick:
        return _QUICK
    shape = SHAPES[shape_name(config, device)]
    return GPTConfig(
        num_layers=shape.num_layers,
        width=shape.width,
        num_heads=shape.num_heads,
        context=config.context,
        vocab_size=config.vocab_size,
        is_checkpointed=config.checkpointed,
    )


def shape_name(config: StepConfig, device: torch.device) -> ShapeName:
    """Return the shape that is asked for, or the largest of three that dense training fits on a device.

    Example:
        >>> import torch
        >>> from samo.bench.settings import StepConfig
        >>> from samo.bench.step import shape_name
        >>> shape_name(StepConfig(), torch.device("cpu"))
        'tiny'
    """
    if config.shape != "auto":
        return config.shape
    if device.type != "cuda":
        return "tiny"
    memory = hardware(device)["memory_bytes"]
    return "gpt3-2.7b" if memory >= 100e9 else "gpt3-760m" if memory >= 36e9 else "gpt3-125m"


def model_flops(shape: GPTConfig, tokens: int) -> float:
    """Return the operations of one step: forward and backward, without what is computed again.

    6 for each token and each weight of blocks and head, and 12 for each token, layer, column of the
    width and token it looks at: Narayanan et al. 2021, without recomputation.

    Example:
        >>> from samo.bench.step import model_flops
        >>> from samo.models.shapes import GPTConfig
        >>> model_flops(GPTConfig(num_layers=1, width=10, num_heads=1, context=5, vocab_size=7), 1)
        8220.0
    """
    layers, width = shape.num_layers, shape.width
    matrices = 12 * layers * width**2 + shape.vocab_size * width
    return float(tokens * (6 * matrices + 12 * layers * width * shape.context))


def tabulate(rows: Sequence[Row]) -> Table:
    """Return the table of some rows."""
    head = (
        "contender",
        "step, ms",
        "p20-p80",
        "over masked",
        "in a row, ms",
        "update, ms",
        "tokens/s",
        "TFLOP/s",
        "peak, GB",
        "over masked",
        "state, B/param",
        "loss",
        "warm-up, s",
    )
    return Table(
        head,
        [
            (
                row.name,
                digits(row.median),
                between(row),
                digits(row.figures["over_masked"]),
                digits(row.figures["in_a_row_ms"]),
                digits(row.figures["update_ms"]),
                count(row.figures["tokens_per_s"]),
                digits(row.figures["tflop_per_s"]),
                digits(_gb(row.figures["peak_bytes"])),
                digits(row.figures["peak_over_masked"]),
                digits(row.figures["state_bytes_per_param"]),
                digits(row.figures["final_loss"]),
                digits(row.figures["warm_up_s"]),
            )
            for row in rows
            if row.median is not None
        ],
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """Return what the ledger says of samo's contenders, a line each."""
    lines = []
    for row in rows:
        found = row.figures
        if row.median is not None and "ledger_measured_bytes" in found:
            lines.append(
                f"{row.name}: model state {_shown(found['ledger_measured_bytes'])} measured, "
                f"{_shown(found['ledger_predicted_bytes'])} predicted; "
                f"{digits(found['pruned_bytes_per_param'])} B/param on pruned tensors"
            )
    return lines


def _row(
    name: str, contest: Contest, parameters: Mapping[str, Any], tokens: int, flops: float
) -> Row:
    record = contest.records.get(name, Record(failure="not measured yet"))
    if record.failure is not None or not record.step_ms:
        return Row(name=name, parameters=parameters, failure=record.failure or "not measured yet")
    found = spread(record.step_ms)
    masked = contest.records.get("masked", Record())
    figures: dict[str, Any] = {
        "over_masked": _ratio(record.round_ms, masked.round_ms),
        "round_ms": record.round_ms,
        "update_ms": spread(record.update_ms)["median"],
        "in_a_row_ms": spread(record.in_a_row_ms)["median"] if record.in_a_row_ms else None,
        "tokens_per_s": round(tokens / found["median"] * 1e3, 1),
        "tflop_per_s": float(f"{flops / found['median'] / 1e9:.5g}"),
        "peak_bytes": record.peak_bytes or None,
        "peak_over_masked": _ratio([record.peak_bytes], [masked.peak_bytes]),
        "state_bytes": record.state_bytes,
        "state_bytes_per_param": round(record.state_bytes / contest.num_params, 4),
        "final_loss": record.losses[-1] if math.isfinite(record.losses[-1]) else None,
        "trained_steps": _warm_up_steps(contest.how) + len(record.losses),
        "warm_up_s": round(record.warm_up_s, 2),
        **record.counts,
    }
    if record.account is not None:
        share = record.account.pruned
        figures |= {
            "ledger_measured_bytes": record.account.measured_bytes,
            "ledger_predicted_bytes": record.account.predicted_bytes,
            "pruned_bytes_per_param": round(sum(share.measured.values()) / share.num_params, 4),
        }
    return Row.timed(name, parameters, record.step_ms, figures)


def _ratio(values: Sequence[float], masked: Sequence[float]) -> float | None:
    """Return the median over rounds of what is measured over that of masked dense training."""
    if not all([*values, *masked]) or not masked:
        return None  # no such contender, or a CPU's peak
    return ratio(values, masked)


def _warm_up_steps(how: Compile) -> int:
    return _GRAPHS_WARM_UP if has_graphs(how) else _WARM_UP


def _fits(names: Sequence[str], num_params: int, device: torch.device) -> bool:
    """Say whether all contenders can stand beside each other in the device's memory."""
    if device.type != "cuda":
        return True  # models that a CPU trains in a reasonable time are small
    memory = hardware(device)["memory_bytes"]
    held = sum(bytes_a_parameter(name) for name in names)
    return held * num_params <= (1 - _ROOM) * memory


def _portions(repeats: int, rounds: int) -> list[int]:
    """Share out steps among rounds, the first ones get what is left over."""
    return [part for i in range(rounds) if (part := repeats // rounds + (i < repeats % rounds))]


def _gb(size: float | None) -> float | None:
    return None if size is None else size / 1e9


def _shown(size: float) -> str:
    return f"{digits(size / 1e9)} GB" if size else NOTHING
