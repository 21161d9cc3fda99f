"""Past Summit: what `samo.planner` predicts for clusters of H100s, and for consumer cards on slow networks.

Every layout that fits is tried, and the fastest is kept: stages in powers of two, replicas by DDP or
FSDP2, micro-batches of 1 to 8 sequences, with and without checkpointing.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from samo.models.shapes import GPTConfig
from samo.planner.hardware import HARDWARE, Cluster, Hardware, Link
from samo.planner.memory import Job, Layout
from samo.planner.network import gpt
from samo.planner.search import evaluate

Row = dict[str, Any]

ROWS: Final = Path(__file__).parent / "results" / "clusters.jsonl"
CONTEXT: Final = 2048
_SHAPES: Final = {"13B": (40, 5120, 40), "66B": (64, 9216, 72), "175B": (96, 12288, 96)}  # fmt: skip
NETWORKS: Final = {
    name: gpt(GPTConfig(num_layers=layers, width=width, num_heads=heads, context=CONTEXT, vocab_size=50304))
    for name, (layers, width, heads) in _SHAPES.items()
}  # fmt: skip
SCHEMES: Final[dict[str, list[Row]]] = {
    "dense": [{"scheme": "dense"}, {"scheme": "autocast"}],
    "dense, 8-bit state": [{"scheme": "8-bit"}],
    "samo": [{"weights": "resident"}, {"weights": "streamed"}],
    "samo, lean": [{"weights": w, "state": "lean"} for w in ("resident", "streamed")],
}
"""Whoever trains may choose among these, each with the layout that suits it best."""


def layouts(num_gpus: int, batch: int, scheme: str, num_layers: int) -> Iterator[Layout]:
    """Yield every layout of a number of GPUs."""
    pipes = [2**k for k in range(11) if 2**k <= min(num_gpus, num_layers)]
    choices = itertools.product(pipes, (1, 2, 4, 8), (False, True), (False, True), SCHEMES[scheme])
    for pipe, micro_batch, checkpointing, shard, own in choices:
        data = num_gpus // pipe
        is_whole = batch % (data * micro_batch) == 0
        can_shard = pipe == 1 < data and own.get("weights") != "resident"
        if is_whole and (can_shard or not shard):
            yield Layout(
                pipe=pipe,
                data=data,
                micro_batch=micro_batch,
                checkpointing=checkpointing,
                shard=shard,
                **own,
            )


def fastest(
    model: str, hardware: Hardware, num_gpus: int, batch: int, scheme: str, sparsity: float = 0.9
) -> Row | None:
    """Return the fastest layout that fits, or None."""
    network, cluster = NETWORKS[model], Cluster(hardware=hardware, num_gpus=num_gpus)
    whole = Job(network=network.pruned(sparsity), batch=batch, context=CONTEXT)
    best: Row | None = None
    for layout in layouts(num_gpus, batch, scheme, len(network.blocks)):
        # FSDP2 reduces the gradients of every micro-batch: as if each were a step without update.
        job, times = whole, 1
        if layout.shard:
            times = layout.micro_batches(whole)
            job = replace(whole, batch=batch // times)
        option = evaluate(job, layout, cluster)
        if option.fits:
            parts = {kind: times * time for kind, time in asdict(option.time).items()}
            parts["optimizer"] /= times
            seconds = sum(parts.values())
            if best is None or seconds < best["seconds"]:
                best = {"seconds": seconds, **parts, "layout": describe(layout)}
    return best


def describe(layout: Layout) -> str:
    """Return a layout in a few words."""
    words = [f"{layout.pipe} stages" if layout.pipe > 1 else "FSDP2" if layout.shard else "DDP"]
    words += [f"micro-batch {layout.micro_batch}"]
    words += ["checkpointed"] * layout.checkpointing
    words += ["streamed"] * (layout.weights == "streamed")
    return ", ".join(words)


def machines(gbit: float, gpu: str = "rtx4090", gpus_per_node: int = 1) -> Hardware:
    """Return GPUs whose nodes are joined by a network of so many Gbit/s."""
    link = Link(bandwidth=gbit * 1e9 / 8, latency_s=5e-5)
    return replace(HARDWARE[gpu], gpus_per_node=gpus_per_node, inter=link)


def questions() -> Iterator[tuple[str, str, float, Hardware, Sequence[tuple[int, int]]]]:
    """Yield what is asked: its name, model, Gbit/s of a node, hardware, and GPUs with their batch."""
    many = [64, 128, 256, 512, 1024, 2048, 4096]
    for model in ("13B", "66B", "175B"):
        yield "strong", model, 3200, HARDWARE["h100"], [(gpus, 4096) for gpus in many]
        yield "weak", model, 3200, HARDWARE["h100"], [(gpus, 4 * gpus) for gpus in many]
        for gpu in ("h100", "h200", "rtx4090"):
            few = [2**k for k in range(9)]
            yield f"fewest, {gpu}", model, 0, HARDWARE[gpu], [(gpus, gpus) for gpus in few]
    for gbit in (10, 25, 50, 100, 200, 400, 800, 1600, 3200):
        yield "network", "13B", gbit, machines(gbit, "h100", 8), [(256, 512)]
    for gbit in (1, 10):
        yield "consumer", "13B", gbit, machines(gbit), [(2**k, 512) for k in range(9)]


def rows() -> Iterator[Row]:
    """Yield the answers, one for each scheme that fits."""
    for question, model, gbit, hardware, sizes in questions():
        for scheme in SCHEMES:
            for gpus, batch in sizes:
                if answer := fastest(model, hardware, gpus, batch, scheme):
                    about = {
                        "question": question,
                        "model": model,
                        "gbit": gbit,
                        "gpu": hardware.name,
                    }
                    yield {**about, "gpus": gpus, "batch": batch, "scheme": scheme, **answer}
                    if question.startswith("fewest"):
                        break


def save() -> None:
    """Write all answers; takes half a minute."""
    found = [
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        for row in rows()
    ]
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in found))


def answers() -> list[Row]:
    """Return the answers that were written."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()]
