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
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from samo.memory.predict import Kind, Scheme, TensorSpec, predict
from samo.pipeline.partition import partition
from samo.planner.network import Layer, Matrix, Network
from samo.utils.formatting import size

SCHEMES: Final[dict[Scheme, str]] = {
    "samo": "samo",
    "paper": "SAMO paper",
    "8-bit": "dense 8-bit",
    "dense": "dense mixed",
    "autocast": "dense autocast",
}
"""What the output calls them."""

SLACK: Final = 0.05
"""Memory that torch's allocator has reserved and cannot use, as a fraction of the peak: assumed."""

_LOGIT: Final = 12
"""Bytes of a logit at the peak of the loss: its log-probability, and two gradients, in fp32."""

_STATE_KINDS: Final[tuple[Kind, ...]] = ("values", "gradients", "moments", "bitmap", "dense")
_PEAK_KINDS: Final = (*_STATE_KINDS, "activations", "logits", "workspace", "slack")
Bytes = dict[str, float]
Stage = tuple[Layer, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to train: a pruned network, sequences and tokens of a step."""

    network: Network
    batch: int  # sequences of a step, over all ranks
    context: int
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return 4 if self.dtype == "float32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.batch * self.context


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

    def __str__(self) -> str:
        weights = f"budget {size(self.weights)}" if isinstance(self.weights, int) else self.weights
        words = [weights, self.state] if self.scheme == "samo" else [SCHEMES[self.scheme]]
        words += ["FSDP2"] if self.shard else []
        words += ["checkpointed"] if self.checkpointing else []
        return ", ".join(words)

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh."""
        return self.pipe * self.data

    @property
    def mesh(self) -> str:
        """Stages x replicas."""
        return f"{self.pipe} x {self.data}"

    @property
    def is_compressed(self) -> bool:
        """Whether only kept values are trained."""
        return self.scheme in ("samo", "paper")

    def micro_batches(self, job: Job) -> int:
        """Return how many micro-batches a replica computes in a step."""
        return -(-job.batch // (self.data * self.micro_batch))

    def can_cut(self, job: Job) -> bool:
        """Return whether a step can be cut so: into equal passes, with work for each replica."""
        count = self.micro_batches(job)
        if self.pipe > 1:
            return count <= job.batch // self.data
        rows, rest = divmod(job.batch, count)
        return rest == 0 and rows >= self.data and -(-rows // self.data) == self.micro_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of the rank that needs most: its state after a step, and its peak, by kind."""

    state: Bytes
    at_peak: Bytes

    @property
    def state_bytes(self) -> float:
        """Model state between backward and update."""
        return sum(self.state.values())

    @property
    def peak_bytes(self) -> float:
        """What torch.cuda.max_memory_allocated() would say."""
        return self.needed_bytes - self.at_peak["slack"]

    @property
    def needed_bytes(self) -> float:
        """The peak with the allocator's slack."""
        return sum(self.at_peak.values())


@lru_cache(maxsize=256)
def stages(network: Network, pipe: int) -> tuple[Stage, ...]:
    """Return the layers of each stage, cut as `samo.Pipeline` does."""
    cuts = partition([layer.cost for layer in network.layers], pipe)
    return tuple(network.layers[start:stop] for start, stop in cuts)


def peak(job: Job, layout: Layout) -> Memory:
    """Return the memory of the stage that needs most.

    Example:
        >>> from samo.planner.memory import Job, Layout, peak
        >>> from samo.planner.network import named
        >>> job = Job(network=named("gpt3-2.7b").pruned(0.9), batch=8, context=1024)
        >>> found = peak(job, Layout(checkpointing=True, micro_batch=8))
        >>> round(found.state_bytes / 1e9, 1), round(found.peak_bytes / 1e9, 1)
        (13.1, 15.0)
    """
    distinct = dict.fromkeys(stages(job.network, layout.pipe))
    return max(
        (_stage_peak(job, layout, stage) for stage in distinct),
        key=lambda memory: memory.needed_bytes,
    )


def _stage_peak(job: Job, layout: Layout, stage: Stage) -> Memory:
    network, item = job.network, job.itemsize
    state = stage_state(job, layout, stage)
    tokens, count = layout.micro_batch * job.context, layout.micro_batches(job)
    unit = tokens * item / 2  # Layer's bytes are for 16 bits
    is_last = stage[-1] is network.layers[-1]
    in_flight = 1 if is_last else min(layout.pipe, count)
    blocks = [layer for layer in stage if layer.attention_width]
    own = max((layer.saved for layer in blocks), default=0.0) * unit
    inputs = 2 * network.width * unit
    held = sum(inputs if layout.checkpointing else layer.saved * unit for layer in blocks)
    held = max(held, inputs)  # a stage keeps its input and its output
    again = own if layout.checkpointing else 0.0
    work = max((_workspace(layer, layout, item, tokens) for layer in blocks), default=0.0)

    head_saved = logits = head_grad = embedding_grad = 0.0
    if is_last:
        head_saved = stage[-1].saved * unit
        logits = float(_LOGIT * network.logits(tokens, layout.pipe))
        head_grad = _dense_grad(stage[-1].matrices[0], item)
    if stage[0] is network.layers[0]:
        embedding_grad = _dense_grad(stage[0].matrices[0], item)
    is_ddp = layout.pipe == 1 and layout.data > 1 and not layout.shard
    early = state["gradients"] if count > 1 or is_ddp else 0.0  # DDP never frees its buckets
    if layout.scheme == "dense" and not early:
        early = state["gradients"] * 2 / 3  # the fp32 gradient is never freed
    moments = [
        {
            "gradients": early,
            "activations": held * in_flight + head_saved,
            "logits": logits,
            "workspace": head_grad,
        },
        {
            "gradients": early or head_grad,
            "activations": held * in_flight + again,
            "workspace": work,
        },
        {
            "gradients": state["gradients"],
            "activations": own + held * (in_flight - 1),
            "workspace": max(work, embedding_grad),
        },
    ]
    at_peak = max(
        ({**dict.fromkeys(_PEAK_KINDS, 0.0), **state, **moment} for moment in moments),
        key=lambda moment: sum(moment.values()),
    )
    at_peak["workspace"] += _gathered(job, layout, stage)
    at_peak["slack"] = SLACK * sum(at_peak.values())
    return Memory(state=state, at_peak=at_peak)


def _dense_grad(matrix: Matrix, item: int) -> float:
    return float(item * matrix.numel) if matrix.is_trained else 0.0


def _workspace(layer: Layer, layout: Layout, item: int, tokens: int) -> float:
    """Return the bytes that the largest product of a block needs in backward."""
    largest = max(matrix.tensor_numel for matrix in layer.matrices)
    dense = 1 if layout.weights == "resident" or layout.scheme != "samo" else 2
    return layer.flow * tokens * item / 2 + dense * item * largest


def _gathered(job: Job, layout: Layout, stage: Stage) -> float:
    """Return what FSDP2 gathers: embedding and head throughout, and two blocks at a time."""
    if not layout.shard:
        return 0.0
    sizes = [num_values(layer, is_compressed=layout.is_compressed) for layer in stage]
    blocks = [own for own, layer in zip(sizes, stage) if layer.attention_width]
    whole = sum(sizes) - sum(blocks)
    if layout.scheme == "samo" and layout.micro_batches(job) > 1:
        whole += sum(sizes)  # `samo train` reduces gradients after the last one
    # Two blocks, one of them with its gradients.
    return job.itemsize * (whole + 3 * max(blocks, default=0.0))


def stage_state(job: Job, layout: Layout, stage: Stage) -> Bytes:
    """Return the bytes of model state of a stage, by kind."""
    total = _state_without_weights(job, layout, stage)
    total["dense"] += _resident_bytes(job, layout, stage, total["dense"])
    return total


def streamed_share(job: Job, layout: Layout, stage: Stage) -> float:
    """Return the fraction of the pruned dense weights that is not resident."""
    pruned = [m.numel for layer in stage for m in layer.matrices if m.sparsity]
    if layout.scheme != "samo" or not pruned:
        return 0.0
    copies = _state_without_weights(job, layout, stage)["dense"]
    return 1 - _resident_bytes(job, layout, stage, copies) / (job.itemsize * sum(pruned))


def _resident_bytes(job: Job, layout: Layout, stage: Stage, copies: float) -> float:
    """Return the dense weights of pruned matrices that stay beside copies of unpruned ones."""
    if layout.scheme != "samo" or layout.weights == "streamed":
        return 0.0
    pruned = [
        (job.itemsize * matrix.tensor_numel, matrix.count)
        for layer in stage
        for matrix in layer.matrices
        if matrix.sparsity
    ]
    if layout.weights == "resident":
        return float(sum(nbytes * count for nbytes, count in pruned))
    budget = left = max(layout.weights - copies, 0.0)
    for nbytes, count in sorted(pruned):  # small ones first, as samo.compress_ does
        left -= min(count, left // nbytes) * nbytes
    return budget - left


def _state_without_weights(job: Job, layout: Layout, stage: Stage) -> Bytes:
    """Return the state but for samo's dense weights of pruned matrices."""
    holds_tied = stage[0] is not job.network.layers[0]
    shards = layout.data if layout.shard else 1
    own = (layout.scheme, layout.state, job.dtype, layout.num_ranks > 1, shards, holds_tied)
    total: Bytes = dict.fromkeys(_STATE_KINDS, 0.0)
    for layer, count in Counter(stage).items():
        for kind, value in _layer_state(layer, *own).items():
            total[kind] += count * value
    return total


@lru_cache(maxsize=4096)
def _layer_state(
    layer: Layer,
    scheme: Scheme,
    state: str,
    dtype: str,
    has_peers: bool,
    shards: int,
    holds_tied: bool,
) -> Bytes:
    is_lean, is_bf16 = state == "lean", dtype == "bfloat16"
    has_narrow = is_bf16 and (is_lean or not has_peers)
    tensors = [
        (own.tensor_numel, own.sparsity, own.is_trained, has_narrow, own.count)
        for own in layer.matrices
        if holds_tied or not own.is_tied
    ]
    tensors += [(numel, 0.0, True, is_bf16 and is_lean, 1) for numel in layer.vectors]
    total: Bytes = dict.fromkeys(_STATE_KINDS, 0.0)
    for numel, sparsity, is_trained, has_narrow_grad, count in tensors:
        is_pruned = sparsity > 0 and scheme in ("samo", "paper")
        values = round(numel * (1 - sparsity)) if is_pruned else numel
        spec = TensorSpec(
            numel=numel,
            kept=values if is_pruned else None,
            dtype=dtype,
            value_dtype="bfloat16" if is_bf16 and is_lean else "float32",
            grad_dtype="bfloat16" if has_narrow_grad else "float32",
            is_lean=is_lean,
            is_resident=not is_pruned and shards == 1,
            is_trained=is_trained,
            held=None if shards == 1 else -(-values // shards),
        )
        found = predict(spec, scheme)
        found["moments"] += found["corrections"]
        for kind in _STATE_KINDS:
            total[kind] += count * found[kind]
    return total


@lru_cache(maxsize=1024)
def num_values(layer: Layer, *, is_compressed: bool, only_trained: bool = False) -> float:
    """Return how many values a layer has: the kept ones, or all."""
    return sum(layer.vectors) + sum(
        matrix.numel * (1 - matrix.sparsity if is_compressed else 1)
        for matrix in layer.matrices
        if not matrix.is_tied and (matrix.is_trained or not only_trained)
    )
