"""Seconds of a training step, by kind.

A matrix product takes ``FLOP / F + bytes / B``, its bytes being those of both operands and of the
result: the sum, not the larger one, is what measured products follow. Everything else takes
``bytes / B``. F and B are the achieved rates of the hardware. An operator takes the host at least
``launch_s``. Backward is two products for one; checkpointing computes blocks twice.

In a pipeline of p stages, each micro-batch takes ``through = sum(t) + 2 (p - 1) link`` seconds, and
follows the one before after ``gap = max(t, link)``; only p of them are in flight. So m take

    through + max((m - 1) gap, (m - 1) // p * through + (m - 1) % p * gap)

The bubble is what exceeds m times the slowest stage, links excluded. DDP reduces gradients during
the backward pass of the last micro-batch, but for those of the first layer. FSDP2 gathers values
ahead of each pass. The replicas of a pipeline reduce after it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from samo.planner.hardware import Cluster, Hardware
from samo.planner.memory import Job, Layout, Stage, num_values, stage_state, stages, streamed_share
from samo.planner.network import Layer

ATTENTION: Final = 2.0
"""Time of an attention's FLOP over that of a product's: assumed."""
_LOSS_FORWARD: Final = 16
_LOSS_BACKWARD: Final = 22
"""Bytes that the loss reads and writes for each logit."""
_BUNDLE_BYTES: Final = 2.0**20
"""Small gradients that the replicas of a stage reduce at once."""
_BACKWARD_TRAFFIC: Final = 2.25
"""Bytes of the backward pass outside of products, over those of the forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step. What overlaps with computing is not counted."""

    compute: float = 0.0  # products and all else of forward and backward, on the slowest stage
    bubble: float = 0.0  # that stage waits for others
    point_to_point: float = 0.0  # it waits for messages between stages
    reduce: float = 0.0  # all-reduce of gradients, or FSDP2's gathers and scatters
    expand_compress: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(asdict(self).values())


class Pass(NamedTuple):
    """Seconds of one micro-batch in a stage: forward, backward, and of samo's kernels in each."""

    forward: float
    backward: float
    expand: float
    compress: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


# Collectives


def all_gather_s(num_bytes: float, cluster: Cluster, members: int, groups: float = 1.0) -> float:
    """Return the time of an all-gather or a reduce-scatter, the faster of ring and two levels.

    Args:
        num_bytes: The whole, of which each member has or gets one part.
        cluster: Where they are: members fill one node after the other.
        members: Ranks that take part.
        groups: How many such groups share the link of a node at the same time.
    """
    if members <= 1 or not num_bytes:
        return 0.0
    inside = min(members, cluster.gpus_per_node)
    nodes = -(-members // inside)
    intra, inter = cluster.intra, cluster.inter
    local = (inside - 1) / inside * num_bytes / intra.bandwidth
    if nodes == 1:
        return local + (inside - 1) * intra.latency_s
    leaving = (nodes - 1) / nodes * num_bytes * groups / inter.bandwidth
    two_levels = local + (inside - 1) * intra.latency_s
    two_levels += leaving + math.ceil(math.log2(nodes)) * inter.latency_s
    # In a ring both kinds of links work at once, and every step waits for the slow one.
    ring = max(leaving, local) + (members - 1) * inter.latency_s
    return min(ring, two_levels)


def all_reduce_s(num_bytes: float, cluster: Cluster, members: int, groups: float = 1.0) -> float:
    """Return the time of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * all_gather_s(num_bytes, cluster, members, groups)


def link_s(num_bytes: float, layout: Layout, cluster: Cluster) -> float:
    """Return the time of a message between stages, on the slowest of their links.

    The replicas of a stage are neighbours in rank, so stages lie ``data`` ranks apart.
    """
    if layout.num_ranks <= cluster.gpus_per_node:
        return cluster.intra.seconds(num_bytes)
    return cluster.inter.seconds(num_bytes, flows=min(layout.data, cluster.gpus_per_node))


# Layers and stages


@lru_cache(maxsize=65536)
def _layer_pass(
    layer: Layer, hardware: Hardware, context: int, tokens: int, item: int
) -> tuple[float, float]:
    """Return the seconds of a forward pass, and of a backward pass without recomputation."""
    flop = num_bytes = back_flop = back_bytes = loss = 0.0
    for matrix in layer.matrices:
        products = 2 if matrix.is_trained else 1  # of backward
        if matrix.is_lookup:
            copied = 2 * item * tokens * matrix.inputs
            num_bytes += copied
            back_bytes += 2 * (products - 1) * copied
            continue
        own = tokens * matrix.share
        flop += 2 * own * matrix.numel
        back_flop += products * 2 * own * matrix.numel
        size = own * (matrix.inputs + matrix.outputs) + matrix.inputs * matrix.outputs
        size *= item * matrix.count * matrix.stack
        num_bytes += size
        back_bytes += products * size
        if matrix.kind == "head":
            loss = tokens * matrix.outputs
    window = min(layer.window or context, context)
    attended = window * (1 - window / (2 * context))  # mean over a causal sequence
    attention = 4 * tokens * attended * layer.attention_width * ATTENTION
    other = layer.traffic * tokens * item / 2
    rate, speed = hardware.achieved_flops, hardware.achieved_bandwidth
    forward = (flop + attention) / rate + (num_bytes + other + _LOSS_FORWARD * loss) / speed
    backward = (back_flop + 2.5 * attention) / rate
    backward += (back_bytes + _BACKWARD_TRAFFIC * other + _LOSS_BACKWARD * loss) / speed
    host = layer.operators * hardware.launch_s
    return max(forward, host), max(backward, 2 * host)


@lru_cache(maxsize=65536)
def _kernel_pass(layer: Layer, hardware: Hardware, item: int, fp32: bool) -> tuple[float, float]:
    """Return the seconds to expand and to compress all pruned matrices of a layer once."""
    pruned = [matrix for matrix in layer.matrices if matrix.sparsity]
    whole = sum((item + 0.129) * matrix.numel for matrix in pruned)
    kept = sum((1 - matrix.sparsity) * matrix.numel for matrix in pruned)
    speed = hardware.achieved_bandwidth
    expand = hardware.expand * (whole + 4 * kept) / speed
    return expand, hardware.compress * (whole + (4 if fp32 else 2) * kept) / speed


def stage_times(job: Job, layout: Layout, cluster: Cluster) -> list[Pass]:
    """Return the seconds of one micro-batch in each stage."""
    cut = stages(job.network, layout.pipe)
    found = {stage: _stage_pass(job, layout, cluster.hardware, stage) for stage in {*cut}}
    return [found[stage] for stage in cut]


def _stage_pass(job: Job, layout: Layout, hardware: Hardware, stage: Stage) -> Pass:
    network, tokens, item = job.network, layout.micro_batch * job.context, job.itemsize
    is_fp32 = layout.num_ranks > 1 and layout.state == "exact"
    is_chunked = network.logits(tokens, layout.pipe) < tokens * network.vocab_size
    streamed = streamed_share(job, layout, stage)
    forward = backward = expand = compress = 0.0
    for layer, count in Counter(stage).items():
        ahead, back = _layer_pass(layer, hardware, job.context, tokens, item)
        is_block = bool(layer.attention_width)
        is_again = layout.checkpointing if is_block else layer.saved > 0 and is_chunked
        forward += count * ahead
        backward += count * (back + ahead * is_again)
        if layout.scheme == "autocast" and item == 2:  # weights to 16 bits, gradients back
            cast = count * 6.0 * layer.num_params / hardware.achieved_bandwidth
            forward, backward = forward + cast, backward + cast * (1 + is_again)
        if layout.is_compressed:
            once, back = _kernel_pass(layer, hardware, item, is_fp32)
            expand += count * once * streamed * (3 if is_again else 2)
            compress += count * back
    return Pass(forward, backward, expand, compress)


def pipeline_s(times: Sequence[float], link: float, count: int) -> float:
    """Return the seconds from the first forward to the last backward pass of a pipeline.

    Args:
        times: Seconds of one micro-batch in each stage, both passes.
        link: Seconds of a message.
        count: Micro-batches.
    """
    through = sum(times) + 2 * (len(times) - 1) * link
    gap = max(*times, link)
    rounds, rest = divmod(count - 1, len(times))
    return through + max((count - 1) * gap, rounds * through + rest * gap)


def step_time(job: Job, layout: Layout, cluster: Cluster) -> StepTime:
    """Return the seconds of a step by kind."""
    passes = stage_times(job, layout, cluster)
    count = layout.micro_batches(job)
    slowest = max(passes, key=lambda one: one.total)
    own = slowest.forward + slowest.backward
    compute, kernels = count * own, count * (slowest.expand + slowest.compress)
    bubble = exposed = 0.0
    if layout.pipe > 1:
        totals = [one.total for one in passes]
        link = link_s(message_bytes(job, layout), layout, cluster)
        whole = pipeline_s(totals, link, count)
        without = pipeline_s(totals, 0.0, count)
        bubble, exposed = without - compute - kernels, whole - without
    return StepTime(
        compute=compute,
        bubble=bubble,
        point_to_point=exposed,
        reduce=reduce_s(job, layout, cluster, slowest),
        expand_compress=kernels,
        optimizer=optimizer_s(job, layout, cluster),
    )


def message_bytes(job: Job, layout: Layout) -> int:
    """Return the bytes of a message between stages."""
    return job.itemsize * job.network.width * layout.micro_batch * job.context


def reduce_s(job: Job, layout: Layout, cluster: Cluster, slowest: Pass) -> float:
    """Return the seconds that a step waits for gradients, and for FSDP2's gathers."""
    if layout.data == 1:
        return 0.0
    # DDP and FSDP2 reduce in 16 bits; the replicas of a pipeline in the type of the values.
    has_wide = layout.pipe > 1 and layout.state == "exact" and layout.scheme == "samo"
    size = 4 if has_wide else job.itemsize
    cut = stages(job.network, layout.pipe)
    trained = [[_trained(layer, layout) for layer in stage] for stage in cut]
    # Stages on the same node reduce at the same time.
    groups = max(cluster.gpus_per_node // min(layout.data, cluster.gpus_per_node), 1)
    groups = min(groups, layout.pipe)
    whole = all_reduce_s(size * max(map(sum, trained)), cluster, layout.data, groups)
    latency = all_gather_s(1, cluster, layout.data)
    if layout.pipe > 1:
        bundles = max(_bundles(stage, layout, size) for stage in cut)
        return whole + 2 * (bundles - 1) * latency
    hidden = cluster.hardware.overlap
    if not layout.shard:
        last = all_reduce_s(size * next(filter(None, trained[0])), cluster, layout.data)
        return max(whole - hidden * slowest.backward, last)
    # One collective for each layer.
    held = [num_values(layer, is_compressed=layout.is_compressed) for layer in cut[0]]
    more = (len(held) - 1) * latency
    gather = all_gather_s(job.itemsize * sum(held), cluster, layout.data) + more
    ends = all_gather_s(job.itemsize * held[0], cluster, layout.data)
    ahead = max(gather - hidden * slowest.forward, ends)
    without = max(gather - hidden * slowest.backward, 0.0)
    # A micro-batch that reduces does so while it gathers for its backward pass.
    reducing = max(whole / 2 + more + gather - hidden * slowest.backward, ends)
    count = layout.micro_batches(job)
    reductions = 1 if layout.scheme == "samo" else count  # FSDP2's default is every one
    return count * ahead + (count - reductions) * without + reductions * reducing


def _trained(layer: Layer, layout: Layout) -> float:
    return num_values(layer, is_compressed=layout.is_compressed, only_trained=True)


def _bundles(stage: Stage, layout: Layout, size: float) -> int:
    """Return the all-reduces of a stage: parameters in their order, up to 1 MiB at a time."""
    count, filled = 0, _BUNDLE_BYTES
    for layer in stage:
        tensors = [
            matrix.tensor_numel * (1 - matrix.sparsity if layout.is_compressed else 1)
            for matrix in layer.matrices
            if matrix.is_trained and not matrix.is_tied
            for _ in range(matrix.count)
        ]
        for numel in (*tensors, *layer.vectors):
            if filled + size * numel > _BUNDLE_BYTES:
                count, filled = count + 1, 0.0
            filled += size * numel
    return count


def optimizer_s(job: Job, layout: Layout, cluster: Cluster) -> float:
    """Return the seconds of the update on the stage with most to update."""
    hardware = cluster.hardware
    # Bytes for each value: reads and writes values and moments, reads gradients.
    factor, each = {
        "samo": (hardware.update, 26),
        "paper": (hardware.update, 40),  # widens gradients and narrows values
        "8-bit": (hardware.update_lean, 14),
        "autocast": (hardware.update_dense, 28),
        "dense": (hardware.update_dense, 40),
    }[layout.scheme]
    if layout.state == "lean":
        factor, each = hardware.update_lean, 12
    shards = layout.data if layout.shard else 1
    most = 0.0
    for stage in {*stages(job.network, layout.pipe)}:
        moved = each * sum(_trained(layer, layout) for layer in stage) / shards
        if layout.is_compressed:  # writes dense weights
            state = stage_state(job, layout, stage)
            moved += state["dense"] + state["bitmap"]
        most = max(most, moved)
    return factor * most / hardware.achieved_bandwidth
