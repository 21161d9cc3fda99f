"""What to type, or to write, to train with the layout of a plan."""

import shlex
from typing import TYPE_CHECKING, Final

from samo.planner.hardware import Cluster
from samo.planner.memory import Job, Layout
from samo.planner.network import PRUNED, Kind
from samo.planner.search import dense_phase

if TYPE_CHECKING:
    from samo.planner.answer import Plan

_PATTERNS: Final[dict[Kind, str]] = {
    "attention": "*att*",
    "mlp": "*mlp*",
    "experts": "*experts*",
    "router": "*mlp.gate.weight",
    "embedding": "*embed*",
    "head": "*head*",
}
"""Names of the matrices of a kind, in samo's GPT and in models of Hugging Face."""


def command(plan: "Plan", own: Layout) -> str:
    """Return the command for a layout, or lines of Python where there is none."""
    job, cluster = plan.job, plan.cluster
    is_gpt = bool(job.network.command)
    if plan.source is None or (own.pipe > 1 and not is_gpt):
        return _python(plan, own)
    what = f"finetune {shlex.quote(plan.source)} --data FILE"
    if is_gpt:
        what = f"train TEXT {job.network.command} --vocab-size {job.network.vocab_size}"
    # A budget is a multiple of 100 MB.
    weights = f"{own.weights / 1e9:g}GB" if isinstance(own.weights, int) else own.weights
    words = [
        _start(own, cluster),
        what,
        f"--context {job.context}",
        "" if plan.is_pruned else _pruning(job),
        _passes(job, own),
        f"--weights {weights}",
        f"--state {own.state}",
        "--checkpointing" if own.checkpointing else "--no-checkpointing",
        "--freeze-embeddings" if job.network.frozen else "",
        f"--teacher {shlex.quote(plan.teacher)}" if plan.teacher else "",
        "--shard weights" if own.shard else "",
        "--dense-steps 0" if is_gpt and not dense_phase(job, own, cluster).fits else "",
    ]
    return " ".join(filter(None, words))


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


def _passes(job: Job, own: Layout) -> str:
    """Return the flags of a step: a pipeline cuts its batch, and others accumulate."""
    count = own.micro_batches(job)
    if own.pipe > 1:
        return f"--batch-size {job.batch} --pipe {own.pipe} --micro-batches {count}"
    return f"--batch-size {job.batch // count} --accumulate {count}"


def _pruning(job: Job) -> str:
    sparsity, rules = _sparsities(job)
    pairs = "".join(f" '{pattern}' {value:g}" for pattern, value in rules.items())
    return f"--sparsity {sparsity:g}" + (f" --rules{pairs}" if rules else "")


def _sparsities(job: Job) -> tuple[float, dict[str, float]]:
    """Return the sparsity of most matrices, and by pattern that of the others."""
    of = job.network.sparsity
    base = next(of[kind] for kind in ("experts", "mlp", "attention") if kind in of)
    usual = {kind: base if kind in PRUNED else 0.0 for kind in of}
    return base, {_PATTERNS[kind]: of[kind] for kind in of if of[kind] != usual[kind]}


def _python(plan: "Plan", own: Layout) -> str:
    """Return lines for a module, or a pipeline, in the order that DDP, FSDP2 and pipelines need."""
    job, dtype = plan.job, f"dtype=torch.{plan.job.dtype}"
    is_gpt, is_pipe = job.network.has_chunks, own.pipe > 1
    part = "pipeline.module" if is_pipe else "model"
    ends = ["embed", "position", "head"]
    if not is_gpt:
        ends = ["get_input_embeddings()", "get_output_embeddings()"]
    mesh = f"samo.mesh(pipe={own.pipe}, data={own.data})"
    passes = f"micro_batches={own.micro_batches(job)}"
    sparsity, rules = _sparsities(job)
    by_rule = f", rules={rules}" if rules else ""
    types = dtype
    if own.state == "lean" and job.dtype == "bfloat16":
        types += ", value_dtype=torch.bfloat16"
    elif own.num_ranks == 1 and job.dtype == "bfloat16":
        types += ", grad_dtype=torch.bfloat16"
    move = "" if is_pipe or job.dtype == "float32" else ".cuda()"
    groups = f"samo.param_groups({part}, lr=1e-5, weight_decay=0.1)"
    lines = {
        f"model = AutoModelForCausalLM.from_pretrained({plan.source!r}, {dtype})": plan.source,
        "model.config = dataclasses.replace(model.config, is_checkpointed=True)": (
            is_gpt and own.checkpointing
        ),
        "model.gradient_checkpointing_enable()": own.checkpointing and not is_gpt,
        "samo.chunk_loss_(model)": not (is_gpt or is_pipe),
        **{f"model.{end}.requires_grad_(False)": job.network.frozen for end in ends},
        f"pipeline = samo.Pipeline(model, loss_fn, {mesh}, {passes})": is_pipe,
        f"masks = samo.Masks.from_zeros({part})": plan.is_pruned,
        f"masks = samo.prune({part}, {sparsity:g}{by_rule})": not plan.is_pruned,
        f"samo.compress_({part}, masks, weights={own.weights!r}, {types}){move}": True,
        "for layer in layers: fully_shard(layer)  # its blocks; see docs/distributed.md": own.shard,
        "fully_shard(model)": own.shard,
        "replica = DistributedDataParallel(model, gradient_as_bucket_view=True)": (
            own.data > 1 and not (own.shard or is_pipe)
        ),
        f'opt = samo.AdamW({groups}, state="{own.state}")  # choose your own rate': True,
    }
    return "\n".join(line for line, is_needed in lines.items() if is_needed)
