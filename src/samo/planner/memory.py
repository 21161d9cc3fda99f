"""The most memory that a step takes on a rank, by kind.

State is that of `samo.memory.predict`, tensor by tensor. A step has three moments at which memory
may be highest, and the peak is the highest of them (N tokens of a micro-batch, width D):

    loss      no gradients yet, all activations, logits, and the head's dense gradient
    backward  begins: the head's gradient, all activations, the last block's own and its workspace
    end       all gradients, the first block's activations and workspace, the embedding's gradient

With several micro-batches, gradients exist at all of them. The workspace is what one matrix
product needs in backward: gradients of activations, a dense gradient, and a streamed weight.
Checkpointing holds the input of each block, 2 N D bytes, and recomputes one block at a time. The
last stage of a pipeline holds one micro-batch, the first as many as there are stages; those between
hold fewer if nobody is late, and the prediction is the most that the engine allows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from samo.errors import ConfigError
from samo.memory.predict import TensorSpec, predict
from samo.pipeline.partition import partition
from samo.planner.network import Kind, Layer, Matrix, Network

__all__ = ["Job", "Layout", "Memory", "peak", "stages"]

Scheme = Literal["samo", "paper", "dense", "autocast", "8-bit"]
"""samo, the SAMO paper's 2 + 24 f bytes, and dense training: mixed precision with fp32 master and
gradient (20 bytes), autocast (16), 8-bit state as FlashOptim has it (7)."""

SLACK: Final = 0.05
"""Memory that torch's allocator has reserved and cannot use, as a fraction of the peak: assumed."""

_LOGIT: Final = 12
"""Bytes of a logit at the peak of the loss: its log-probability, and two gradients, in fp32."""

_STATE_KINDS: Final = ("values", "gradients", "moments", "bitmap", "dense")
PEAK_KINDS: Final = (*_STATE_KINDS, "activations", "logits", "workspace", "slack")
Bytes = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to train: a network, its sparsity by kind of matrix, sequences and tokens of a step."""

    network: Network
    sparsity: tuple[tuple[Kind, float], ...]
    batch: int  # sequences of a step, over all ranks
    context: int
    dtype: str = "bfloat16"
    frozen: frozenset[Kind] = frozenset()  # kinds of unpruned matrices that are not trained

    def __post_init__(self) -> None:
        of = dict(self.sparsity)
        if pruned := [kind for kind in sorted(self.frozen) if of[kind]]:
            raise ConfigError(
                f"{', '.join(pruned)} cannot be frozen and pruned; leave one of them out"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return 4 if self.dtype == "float32" else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How to train it: scheme, mesh, micro-batch, and what each rank keeps."""

    scheme: Scheme = "samo"
    weights: Literal["resident", "streamed"] | int = "resident"
    state: Literal["exact", "lean"] = "exact"
    checkpointing: bool = False
    pipe: int = 1
    data: int = 1
    shard: bool = False  # FSDP2 instead of DDP
    micro_batch: int = 1  # sequences of a micro-batch

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh."""
        return self.pipe * self.data

    def micro_batches(self, job: Job) -> int:
        """Return how many micro-batches a replica computes in a step."""
        return -(-job.batch // (self.data * self.micro_batch))


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of the rank that needs most: its state after a step, and its peak, by kind."""

    stage: int
    state: Bytes
    at_peak: Bytes = field(default_factory=dict)

    @property
    def state_bytes(self) -> float:
        """Model state between backward and update."""
        return sum(self.state.values())

    @property
    def peak_bytes(self) -> float:
        """What torch.cuda.max_memory_allocated() would say."""
        return sum(value for kind, value in self.at_peak.items() if kind != "slack")

    @property
    def needed_bytes(self) -> float:
        """The peak with the allocator's slack."""
        return sum(self.at_peak.values())


@lru_cache(maxsize=256)
def stages(network: Network, pipe: int) -> tuple[tuple[Layer, ...], ...]:
    """Return the layers of each stage, cut as `samo.Pipeline` does."""
    cuts = partition([layer.cost for layer in network.layers], pipe)
    return tuple(network.layers[start:stop] for start, stop in cuts)


def peak(job: Job, layout: Layout) -> Memory:
    """Return the memory of the stage that needs most.

    Example:
        >>> from samo.planner.memory import Job, Layout, peak
        >>> from samo.planner.network import named, sparsities
        >>> sparsity = tuple(sparsities(0.9).items())
        >>> job = Job(network=named("gpt3-2.7b"), sparsity=sparsity, batch=8, context=1024)
        >>> found = peak(job, Layout(checkpointing=True, micro_batch=8))
        >>> round(found.state_bytes / 1e9, 1), round(found.peak_bytes / 1e9, 1)
        (13.1, 15.0)
    """
    found: dict[frozenset[tuple[Layer, int]], Memory] = {}
    for number, stage in enumerate(stages(job.network, layout.pipe)):
        # Of equal stages one is enough.
        key = frozenset(Counter(stage).items())
        if key not in found:
            found[key] = _stage_peak(job, layout, number, stage)
    return max(found.values(), key=lambda memory: memory.needed_bytes)


def _stage_peak(job: Job, layout: Layout, number: int, stage: Sequence[Layer]) -> Memory:
    network, item = job.network, job.itemsize
    state = stage_state(job, layout, number, stage)
    tokens, count = layout.micro_batch * job.context, layout.micro_batches(job)
    unit = tokens * item / 2  # Layer's bytes are for 16 bits
    is_first, is_last = number == 0, number == layout.pipe - 1
    in_flight = 1 if is_last else min(layout.pipe, count)
    blocks = [layer for layer in stage if layer.attention_width]
    own = max((layer.saved for layer in blocks), default=0.0) * unit
    inputs = 2 * network.width * unit
    held = sum(inputs if layout.checkpointing else layer.saved * unit for layer in blocks)
    held = max(held, inputs)  # a stage keeps its input and its output
    again = own if layout.checkpointing else 0.0
    work = max((_workspace(layer, layout, item, tokens) for layer in blocks), default=0.0)
    gathered = _gathered(job, layout, stage)

    head = stage[-1] if is_last else None
    head_saved = logits = head_grad = 0.0
    if head is not None:
        head_saved = head.saved * unit
        head_grad = (
            0.0 if is_frozen(head.matrices[0], job) else float(item * head.matrices[0].numel)
        )
        logits = float(_LOGIT * network.logits(tokens, layout.pipe))
    embedded = 0.0
    if is_first and not is_frozen(stage[0].matrices[0], job):
        embedded = float(item * stage[0].matrices[0].numel)
    is_ddp = layout.pipe == 1 and layout.data > 1 and not layout.shard
    early = state["gradients"] if count > 1 or is_ddp else 0.0  # DDP never frees its buckets
    if layout.scheme == "dense" and not early:
        early = state["gradients"] * 2 / 3  # the fp32 gradient is never freed
    everything = held * in_flight + head_saved
    moments = [
        {"gradients": early, "activations": everything, "logits": logits, "workspace": head_grad},
        {
            "gradients": early or head_grad,
            "activations": held * in_flight + again,
            "workspace": work,
        },
        {
            "gradients": state["gradients"],
            "activations": own + held * (in_flight - 1),
            "workspace": max(work, embedded),
        },
    ]
    best: Bytes = {}
    for moment in moments:
        filled = {**dict.fromkeys(PEAK_KINDS, 0.0), **state, **moment}
        filled["workspace"] += gathered
        filled["slack"] = SLACK * sum(filled.values())
        if sum(filled.values()) > sum(best.values()):
            best = filled
    return Memory(stage=number, state=state, at_peak=best)


def _workspace(layer: Layer, layout: Layout, item: int, tokens: int) -> float:
    """Return the bytes that the largest product of a block needs in backward."""
    largest = max(matrix.inputs * matrix.outputs * matrix.stack for matrix in layer.matrices)
    dense = 1 if layout.weights == "resident" or layout.scheme != "samo" else 2
    return layer.flow * tokens * item / 2 + dense * item * largest


def _gathered(job: Job, layout: Layout, stage: Sequence[Layer]) -> float:
    """Return what FSDP2 gathers: embedding and head throughout, and two blocks at a time."""
    if not layout.shard:
        return 0.0
    sizes = [layer_values(layer, job.sparsity, layout.scheme) for layer in stage]
    blocks = [size for size, layer in zip(sizes, stage) if layer.attention_width]
    whole = sum(sizes) - sum(blocks)
    if layout.scheme == "samo" and layout.micro_batches(job) > 1:
        whole += sum(sizes)  # `samo train` reduces gradients after the last one
    # Two blocks, one of them with its gradients.
    return job.itemsize * (whole + 3 * max(blocks, default=0.0))


def stage_state(job: Job, layout: Layout, number: int, stage: Sequence[Layer]) -> Bytes:
    """Return the bytes of model state of a stage, by kind."""
    total = dict.fromkeys(_STATE_KINDS, 0.0)
    budget = layout.weights if isinstance(layout.weights, int) else None
    key = (job.frozen, layout.scheme, layout.state, job.dtype, layout.num_ranks > 1)
    shards = layout.data if layout.shard else 1
    holds_tied = number > 0
    for layer, count in Counter(stage).items():
        for kind, value in _layer_state(layer, job.sparsity, *key, shards, holds_tied).items():
            total[kind] += count * value
    if layout.scheme == "samo":
        pruned = [
            (
                job.itemsize * matrix.inputs * matrix.outputs * matrix.stack,
                matrix.count // matrix.stack,
            )
            for layer in stage
            for matrix in layer.matrices
            if dict(job.sparsity)[matrix.kind]
        ]
        left = float("inf") if layout.weights == "resident" else 0.0
        if budget is not None:
            left = max(budget - total["dense"], 0.0)
        for size, count in sorted(pruned):  # small ones first, as samo.compress_ does
            taken = min(count, left // size) if left < float("inf") else count
            total["dense"] += taken * size
            left -= taken * size
    return total


@lru_cache(maxsize=4096)
def _layer_state(
    layer: Layer,
    sparsity: tuple[tuple[Kind, float], ...],
    frozen: frozenset[Kind],
    scheme: Scheme,
    state: str,
    dtype: str,
    has_peers: bool,
    shards: int,
    holds_tied: bool,
) -> Bytes:
    """Return the state of one layer; without the dense weights of pruned matrices for samo."""
    of = dict(sparsity)
    total: Bytes = dict.fromkeys(_STATE_KINDS, 0.0)
    for matrix in layer.matrices:
        if matrix.is_tied and not holds_tied:
            continue
        numel = matrix.inputs * matrix.outputs * matrix.stack
        pruned = of[matrix.kind]
        kept = round(numel * (1 - pruned)) if pruned else None
        is_trained = matrix.kind not in frozen
        own = (scheme, state, dtype, has_peers, shards, is_trained)
        for kind, value in _tensor_state(numel, kept, *own).items():
            total[kind] += value * matrix.count / matrix.stack
    for numel in layer.vectors:
        one = _tensor_state(numel, None, scheme, state, dtype, True, shards, True)
        for kind, value in one.items():
            total[kind] += value
    return total


def _tensor_state(
    numel: int,
    kept: int | None,
    scheme: Scheme,
    state: str,
    dtype: str,
    has_peers: bool,
    shards: int,
    is_trained: bool,
) -> Bytes:
    if not is_trained:
        size = 4 if dtype == "float32" or scheme == "autocast" else 2
        return {**dict.fromkeys(_STATE_KINDS, 0.0), "values": size * numel / shards}
    if scheme == "samo":
        is_lean = state == "lean"
        whole = numel if kept is None else kept
        has_narrow = dtype == "bfloat16" and (is_lean or not has_peers)
        spec = TensorSpec(
            numel=numel,
            kept=kept,
            dtype=dtype,
            value_dtype="bfloat16" if is_lean and dtype == "bfloat16" else "float32",
            grad_dtype="bfloat16" if has_narrow else "float32",
            is_lean=is_lean,
            is_resident=kept is None and shards == 1,
            held=None if shards == 1 else -(-whole // shards),
        )
        found = predict(spec)
        return {
            "values": found["values"],
            "gradients": found["gradients"],
            "moments": found["moments"] + found["corrections"],
            "bitmap": found["bitmap"],
            "dense": found["dense"],
        }
    if scheme == "paper" and kept is not None:  # 2 + 24 f, of which 2 f in the update alone
        each = {"values": 6, "gradients": 6, "moments": 8, "bitmap": 4}
        return {**{kind: float(size * kept) for kind, size in each.items()}, "dense": 2.0 * numel}
    is_wide = dtype == "float32"
    sizes = {
        "8-bit": (3, 2, 2, 0),
        "autocast": (4, 4, 8, 0),
    }.get(scheme, (4, 6, 8, 2))
    if is_wide:
        sizes = (4, 4, 8, 0)
    parts = dict(zip(("values", "gradients", "moments", "dense"), sizes))
    return {"bitmap": 0.0, **{kind: size * numel / shards for kind, size in parts.items()}}


@lru_cache(maxsize=1024)
def layer_values(
    layer: Layer,
    sparsity: tuple[tuple[Kind, float], ...],
    scheme: Scheme = "samo",
    frozen: frozenset[Kind] = frozenset(),
) -> float:
    """Return how many values a layer has: the kept ones, or all; those of frozen kinds left out."""
    of = dict(sparsity)
    is_dense = scheme not in ("samo", "paper")
    return sum(layer.vectors) + sum(
        matrix.numel * (1 if is_dense else 1 - of[matrix.kind])
        for matrix in layer.matrices
        if not matrix.is_tied and matrix.kind not in frozen
    )


def is_frozen(matrix: Matrix, job: Job) -> bool:
    """Return whether a matrix is not trained; a tied head is if the embedding is."""
    return ("embedding" if matrix.is_tied else matrix.kind) in job.frozen
