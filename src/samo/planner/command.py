"""What to type, or to write, to train with the layout of a plan."""

import shlex
from collections.abc import Iterator

from samo.planner.hardware import Cluster
from samo.planner.memory import Job, Layout
from samo.planner.network import PRUNED, Kind
from samo.planner.search import dense_phase

__all__ = ["command"]

_PATTERNS: dict[Kind, str] = {
    "attention": "*att*",
    "mlp": "*mlp*",
    "experts": "*experts*",
    "router": "*mlp.gate.weight",
    "embedding": "*embed*",
    "head": "*head*",
}
"""Names of the matrices of a kind, in samo's GPT and in models of Hugging Face."""


def command(
    job: Job, own: Layout, cluster: Cluster, source: str | None, *, is_pruned: bool = False
) -> Iterator[str]:
    """Yield the lines for a layout; ``source`` is None for a module in hand.

    Args:
        job: What to train.
        own: How.
        cluster: Where.
        source: A folder; None for a module in hand.
        is_pruned: Whether the folder has its masks, so that nothing is left to prune.
    """
    if job.network.command and source is not None:
        yield _train(job, own, cluster)
    elif source is not None and own.pipe == 1:
        yield _finetune(job, own, cluster, source, is_pruned=is_pruned)
    else:
        yield from _python(job, own, source, is_pruned=is_pruned)


def _sparsities(job: Job) -> tuple[float, dict[str, float]]:
    """Return the sparsity of most matrices, and by pattern that of the others."""
    kinds = {matrix.kind for layer in job.network.layers for matrix in layer.matrices}
    of = {kind: value for kind, value in job.sparsity if kind in kinds}
    base = next(of[kind] for kind in ("experts", "mlp", "attention") if kind in of)
    usual = {kind: base if kind in PRUNED else 0.0 for kind in of}
    return base, {_PATTERNS[kind]: of[kind] for kind in of if of[kind] != usual[kind]}


def _train(job: Job, own: Layout, cluster: Cluster) -> str:
    passes = _passes(job, own)
    if own.pipe > 1:  # which cuts a pass into micro-batches
        count = own.micro_batches(job)
        passes = [f"--batch-size {job.batch}", f"--pipe {own.pipe}", f"--micro-batches {count}"]
    flags = [
        job.network.command,
        f"--vocab-size {job.network.vocab_size}",
        f"--context {job.context}",
        *_pruning(job),
        *passes,
        f"--weights {own.weights}" if own.weights != "resident" else "",
        f"--state {own.state}" if own.state != "exact" else "",
        "--checkpointing" if own.checkpointing else "",
        "--shard weights" if own.shard else "",
        "" if dense_phase(job, own, cluster).fits else "--dense-steps 0",
    ]
    return f"{_start(own, cluster)} train TEXT {' '.join(filter(None, flags))}"


def _finetune(job: Job, own: Layout, cluster: Cluster, source: str, *, is_pruned: bool) -> str:
    flags = [
        shlex.quote(source),
        "--data FILE",
        f"--context {job.context}",
        *([] if is_pruned else _pruning(job)),
        *_passes(job, own),
        f"--weights {own.weights}",
        f"--state {own.state}",
        "--checkpointing" if own.checkpointing else "--no-checkpointing",
        "--freeze-embeddings" if job.frozen else "",
        "--shard weights" if own.shard else "",
    ]
    return f"{_start(own, cluster)} finetune {' '.join(filter(None, flags))}"


def _start(own: Layout, cluster: Cluster) -> str:
    """Return how the ranks are started."""
    if own.num_ranks == 1:
        return "samo"
    node = cluster.gpus_per_node
    nodes = -(-own.num_ranks // node)
    if nodes == 1:
        return f"samo launch -n {own.num_ranks}"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {node} --rdzv-backend c10d "
        "--rdzv-endpoint HOST:29500 -m samo"
    )


def _passes(job: Job, own: Layout) -> list[str]:
    """Return the flags of a step without a pipeline, which accumulates its micro-batches."""
    size = own.data * own.micro_batch
    return [f"--batch-size {size}", f"--accumulate {own.micro_batches(job)}"]


def _pruning(job: Job) -> list[str]:
    sparsity, rules = _sparsities(job)
    pairs = " ".join(f"'{pattern}' {value:g}" for pattern, value in rules.items())
    return [f"--sparsity {sparsity:g}", f"--rules {pairs}" if rules else ""]


def _python(job: Job, own: Layout, source: str | None, *, is_pruned: bool) -> Iterator[str]:
    """Yield lines for a module, or a pipeline, in the order that DDP, FSDP2 and pipelines need."""
    sparsity, rules = _sparsities(job)
    lean = ", value_dtype=torch.bfloat16" if own.state == "lean" else ""
    is_cpu = job.dtype == "float32"
    narrow = ", grad_dtype=torch.bfloat16" if own.num_ranks == 1 and not lean else ""
    narrow = "" if is_cpu else narrow
    if source is not None:
        dtype = "float32" if is_cpu else "bfloat16"
        yield f"model = AutoModelForCausalLM.from_pretrained({source!r}, dtype=torch.{dtype})"
    if own.checkpointing and source is not None:
        yield "model.gradient_checkpointing_enable()"
    if own.pipe == 1:
        yield "samo.chunk_loss_(model)"
    for end in ("input", "output") if job.frozen else ():
        yield f"model.get_{end}_embeddings().requires_grad_(False)"
    part = "model"
    if own.pipe > 1:
        mesh = f"samo.mesh(pipe={own.pipe}, data={own.data})"
        yield (
            f"pipeline = samo.Pipeline(model, loss_fn, {mesh}, "
            f"micro_batches={own.micro_batches(job)})"
        )
        part = "pipeline.module"
    by_rule = f", rules={rules}" if rules else ""
    pruning = "samo.Masks.from_zeros" if is_pruned else "samo.prune"
    pruning += f"({part})" if is_pruned else f"({part}, {sparsity:g}{by_rule})"
    yield f"masks = {pruning}"
    move = "" if own.pipe > 1 or is_cpu else ".cuda()"
    yield f"samo.compress_({part}, masks, weights={own.weights!r}{narrow}{lean}){move}"
    if own.shard:
        yield "for layer in layers: fully_shard(layer)  # its blocks; see docs/distributed.md"
        yield "fully_shard(model)"
    elif own.data > 1 and own.pipe == 1:
        yield "replica = DistributedDataParallel(model, gradient_as_bucket_view=True)"
    groups = f"samo.param_groups({part}, lr=1e-5, weight_decay=0.1)"
    yield f'opt = samo.AdamW({groups}, state="{own.state}")  # choose your own rate'
