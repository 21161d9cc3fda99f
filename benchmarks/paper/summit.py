"""A model of Summit, calibrated on dense AxoNN and asked about AxoNN+SAMO.

The equations are those of the paper's section IV-B (bubble, messages, collective), and a roofline for
the time of a pass: matrix products at a fraction of the peak, all other kernels at a fraction of the
memory's bandwidth. Time is then linear in its costs, which `calibrate` finds by least squares:

    matmul      seconds for the work of one second at 125 Tflop/s
    memory      seconds for the bytes of one second at 900 GB/s
    messages    seconds for a GB that a stage sends or receives
    collective  seconds for a GB through the all-reduce of one GPU

Nothing else is fitted: bytes are counted from the kernels that run, and memory decides the layout,
since the paper does not print one. Which of 16 forms is used, `select` decides by dense rows alone.
"""

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper.published import read

__all__ = [
    "FORMS", "LIMIT", "MODELS", "SCHEMES", "Fit", "Form", "Model", "Scheme", "calibrate",
    "left_out_errors", "schemes", "select",
]  # fmt: skip

Costs = NDArray[np.float64]

PEAK: Final = 125e12  # fp16 flop/s of a V100, printed in the paper
BANDWIDTH: Final = 900e9  # bytes/s of its memory
TOKENS: Final = 2048  # a sequence; GPT-3's, not printed. Micro-batches are of one sequence.
WORDS: Final = 51200  # of the AxoNN paper
LIMIT: Final = 13e9
"""Bytes that state and activations may take. A V100 of 16 GB reports 16.9e9; context, cuBLAS, NCCL and
MPI take about 1.5e9 of them, and torch's allocator loses some 15 % of the rest to fragmentation."""

NODE: Final = 6  # GPUs
PARTS: Final = ("compute", "bubble", "messages", "collective", "compress and update")


@dataclass(frozen=True)
class Model:
    """A GPT: its shape, and what one sequence of it computes and moves."""

    name: str
    layers: int
    hidden: int
    heads: int
    batch: int

    @property
    def params(self) -> float:
        """Parameters, all of them pruned, as the paper's formula has it."""
        return 12 * self.layers * self.hidden**2 + (WORDS + TOKENS) * self.hidden

    @property
    def flops(self) -> float:
        """Flops of a sequence, forward, backward and recomputed: the formula that the paper uses."""
        more = 1 + TOKENS / (6 * self.hidden) + WORDS / (16 * self.layers * self.hidden)
        return 96 * TOKENS * self.layers * self.hidden**2 * more

    @property
    def traffic(self) -> float:
        """Bytes that kernels other than matrix products move for a sequence.

        For each attention score (Megatron's fused softmax, then dropout): forward 4 + 5, the same when
        recomputed, backward 6 + 5. For each of a layer's hidden entries: two norms, a permute, bias and GELU on
        four times the width, bias, dropout and residual twice: 42, 42 and 88. A logit: 30 in the loss.
        """
        scores, entries = self.heads * TOKENS**2, TOKENS * self.hidden
        return self.layers * (29 * scores + 172 * entries) + 30 * TOKENS * WORDS

    def activations(self, pipe: int) -> float:
        """Bytes of activations on the fullest stage, layers checkpointed.

        The first stage holds its layers' inputs for `pipe` micro-batches, the last one micro-batch and the logits (12
        bytes each: 16 and 32 bit, values and gradients); one layer is recomputed (Korthikanti et al., 2022).
        """
        entries = TOKENS * self.hidden
        recomputed = 34 * entries + 5 * self.heads * TOKENS**2
        first = 2 * entries * self.layers
        last = first / pipe + 12 * TOKENS * WORDS
        return max(first if pipe > 1 else 0, last) + recomputed


@dataclass(frozen=True)
class Scheme:
    """How state is kept: bytes for each parameter that are held, sent and moved."""

    name: str
    state: float  # held
    sent: float  # in the all-reduce
    pass_: float  # moved by a micro-batch, beside the products
    step: float  # moved by the optimizer
    gradients: float = 0.0  # dense weights and gradients in flight, over hidden squared


def schemes(sparsity: float = 0.9) -> dict[str, Scheme]:
    """Return dense training, the paper's scheme and samo's own at a sparsity.

    Dense: gradients are added up (6 bytes); cast, Adam, cast back (40). The paper: a gather reads the whole
    gradient, an index of 4 bytes, and adds up; the step scatters into zeros. samo: a bitmap of 0.13 bytes, one fused update;
    fp32 gradients, since these runs have replicas, and 16 bits on the wire; streamed weights are
    expanded three times a micro-batch: forward, recomputed, backward.
    """
    f = 1 - sparsity
    compress = 2.13 + 12 * f
    found = (
        Scheme("dense", 20, 2, 6, 40),
        Scheme("paper", 2 + 24 * f, 2 * f, 2 + 12 * f, 6 + 46 * f, 8),
        Scheme("resident", 2.13 + 16 * f, 2 * f, compress, 2.13 + 28 * f, 8),
        Scheme("streamed", 0.13 + 16 * f, 2 * f, compress + 3 * (2.13 + 4 * f), 28 * f, 16),
        Scheme("streamed, lean", 0.14 + 7 * f, 2 * f, compress + 3 * (2.13 + 2 * f), 12 * f, 16),
    )
    return {scheme.name: scheme for scheme in found}


SCHEMES: Final = schemes()
MODELS: Final = {
    str(row["model"]): Model(
        str(row["model"]), *(int(row[key]) for key in ("layers", "hidden", "heads", "batch"))
    )
    for row in read("models")
}


def layout(model: Model, scheme: Scheme, limit: float = LIMIT) -> int:
    """Return the fewest stages that fit: a power of two, as every number of GPUs in the paper is."""
    pipe = 1
    while (
        scheme.state * model.params / pipe
        + scheme.gradients * model.hidden**2
        + model.activations(pipe)
        > limit
    ):
        pipe *= 2
        if pipe > model.layers:
            raise ValueError(
                f"{model.name} ({scheme.name}) does not fit into {limit / 1e9:g} GB a GPU even with "
                f"one layer a stage; raise the limit"
            )
    return pipe


@dataclass(frozen=True)
class Form:
    """What the time of a step is made of."""

    fill: bool = True  # messages while the pipeline fills; the paper's eq. 6 has none
    shared: bool = True  # GPUs of a node use its link as one, if they take part in one all-reduce
    extra: Literal["", "constant", "latency", "width"] = ""
    """A fifth cost: for a step, for a hop of the all-reduce's ring, or for narrow products."""

    @property
    def num_costs(self) -> int:
        """Costs that are fitted."""
        return 5 if self.extra else 4


FORMS: Final = tuple(
    Form(*options)
    for options in itertools.product(
        (True, False), (True, False), ("", "constant", "latency", "width")
    )
)


def parts(
    model: Model, scheme: Scheme, gpus: int, pipe: int, form: Form = FORMS[0]
) -> dict[str, Costs]:
    """Return how much of each cost the parts of a step take."""
    replicas = gpus / pipe
    micro_batches = model.batch / replicas
    passes = np.array([model.flops / PEAK, model.traffic / BANDWIDTH, 0, 0, 0]) / pipe
    if form.extra == "width":
        passes[4] = passes[0] * 1024 / model.hidden
    # A stage in the middle receives and sends, forward and backward; a hop of the fill is half of that.
    message = np.array([0, 0, 4 * 2 * TOKENS * model.hidden / 1e9 if pipe > 1 else 0, 0, 0])
    ring = 2 * (replicas - 1) / replicas * scheme.sent * model.params / pipe / 1e9
    if form.shared:  # stages of a node are in different all-reduces
        ring *= min(pipe, NODE) / NODE
    fill = message / 2 if form.fill else 0 * message
    moved = (micro_batches * scheme.pass_ + scheme.step) * model.params / pipe / BANDWIDTH
    more = {"constant": 1.0, "latency": 2e-3 * (replicas - 1)}.get(form.extra, 0.0)
    found = (
        micro_batches * passes,
        (pipe - 1) * (passes + fill),
        micro_batches * message,
        np.array([0, 0, 0, ring, more if form.extra == "latency" else 0]),
        np.array([0, moved, 0, 0, more if form.extra == "constant" else 0]),
    )
    return {name: part[: form.num_costs] for name, part in zip(PARTS, found)}


@dataclass(frozen=True)
class Fit:
    """The costs, and what they were found with."""

    costs: Costs
    limit: float
    form: Form

    def pipe(self, model: str, scheme: str) -> int:
        """Return the number of stages."""
        return layout(MODELS[model], SCHEMES[scheme], self.limit)

    def parts(self, model: str, scheme: str, gpus: int) -> dict[str, float]:
        """Return the seconds of a step by part."""
        pipe = self.pipe(model, scheme)
        found = parts(MODELS[model], SCHEMES[scheme], gpus, pipe, self.form)
        return {name: float(part @ self.costs) for name, part in found.items()}

    def seconds(self, model: str, scheme: str, gpus: int) -> float:
        """Return the seconds of a step."""
        return sum(self.parts(model, scheme, gpus).values())

    def dense_errors(self, only: str = "") -> Costs:
        """Return the relative errors on AxoNN's dense rows, or on those of one model."""
        rows = [row for row in read("dense") if only in ("", row["model"])]
        return np.array(
            [
                self.seconds(str(row["model"]), "dense", int(row["gpus"])) / row["axonn"] - 1
                for row in rows
            ]
        )


def calibrate(leave_out: str = "", limit: float = LIMIT, form: Form | None = None) -> Fit:
    """Find the costs with the least squared relative error on AxoNN's dense rows.

    Reads no other table. The form is that of `select`. A cost that would come out negative is 0.
    """
    form = form or select()
    amounts = []
    for row in read("dense"):
        model, dense = MODELS[str(row["model"])], SCHEMES["dense"]
        if model.name != leave_out:
            pipe = layout(model, dense, limit)
            found = parts(model, dense, int(row["gpus"]), pipe, form)
            amounts.append(sum(found.values()) / row["axonn"])
    matrix, used = np.array(amounts), np.arange(form.num_costs)
    while True:
        found = np.linalg.lstsq(matrix[:, used], np.ones(len(matrix)), rcond=None)[0]
        if (found >= 0).all():
            costs = np.zeros(form.num_costs)
            costs[used] = found
            return Fit(costs, limit, form)
        used = np.delete(used, found.argmin())


def left_out_errors(form: Form) -> Costs:
    """Return the errors on the dense rows of each model, predicted from those of the others."""
    return np.concatenate([calibrate(name, form=form).dense_errors(name) for name in MODELS])


@cache
def select() -> Form:
    """Return the form that predicts dense rows of models it has not seen best; of equals, the smaller.

    This is the whole choice of a form, and it reads `dense.csv` alone. Errors that differ by less
    than a tenth of a point are equal.
    """
    errors = {form: float(np.abs(left_out_errors(form)).mean()) for form in FORMS}
    good = [form for form in FORMS if errors[form] < min(errors.values()) + 1e-3]
    return min(good, key=lambda form: (form.num_costs, errors[form]))
