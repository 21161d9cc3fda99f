"""What `samo plan` predicts beside what was measured: committed H200 rows, and this machine now.

    python -m benchmarks.plan_check.bench h200
    python -m benchmarks.plan_check.bench here --ranks 1 2 4 --rounds 15

`here` times the machine and trains a GPT on gloo ranks in turns, so that other work slows both.
"""

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import samo
from benchmarks import ranks
from samo.bench.measure_machine import Machine
from samo.bench.timing import in_turns
from samo.models.gpt import GPT
from samo.models.shapes import SHAPES, GPTConfig
from samo.planner.cost import step_time
from samo.planner.hardware import HARDWARE, Cluster
from samo.planner.memory import Job, Layout, peak
from samo.planner.network import gpt

RESULTS: Final = Path(__file__).parents[1] / "results"
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "dense": {"scheme": "dense"},
    "autocast": {"scheme": "autocast"},
    "flashoptim": {"scheme": "8-bit"},
    "samo": {},
    "lean": {"state": "lean"},
    "streamed": {"weights": "streamed"},
    "streamed-lean": {"weights": "streamed", "state": "lean"},
}
"""The contenders of `samo bench step` that the planner has a scheme for."""


def h200_rows() -> list[dict[str, Any]]:
    """Return the measured eager steps, of equal ones the fastest."""
    fastest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("st*h200*/rows.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            about = row["parameters"]
            is_eager = about.get("compile", "none") == "none"
            if row["name"] in LAYOUTS and is_eager and row["median"] is not None:
                # Where the host is the limit, the same step took up to 1.5 times as long.
                bytes_per_param = round(row["figures"]["state_bytes_per_param"], 2)
                key = (row["name"], about["shape"], about["batch_size"], bytes_per_param)
                fastest[key] = min(fastest.get(key, row), row, key=lambda one: one["median"])
    return list(fastest.values())


def predict_row(row: dict[str, Any]) -> tuple[Job, Layout]:
    """Return what was trained in a row, and how."""
    about = row["parameters"]
    shape = SHAPES[about["shape"]]
    config = GPTConfig(
        num_layers=shape.num_layers,
        width=shape.width,
        num_heads=shape.num_heads,
        context=about["context"],
        vocab_size=50_304,
    )
    job = Job(
        network=gpt(config).pruned(about["sparsity"]),
        batch=about["batch_size"],
        context=about["context"],
    )
    layout = Layout(
        micro_batch=job.batch, checkpointing=about["checkpointed"], **LAYOUTS[row["name"]]
    )
    return job, layout


def copies_of(row: dict[str, Any]) -> float:
    """Return the bytes of 16-bit copies of unpruned parameters that a row's model does without.

    `samo bench` trains bfloat16 parameters, which need none; most rows of 2026-11-16 have some.
    """
    job, layout = predict_row(row)
    if row["name"] not in ("samo", "streamed"):
        return 0.0
    copies = peak(job, replace(layout, weights="streamed")).state["dense"]
    has_some = row["figures"]["state_bytes"] > peak(job, layout).state_bytes - copies / 2
    return 0.0 if has_some else copies


def h200_table() -> Iterator[str]:
    """Yield predicted and measured state, peak and time."""
    yield "| model, sequences | scheme | state, GB | peak, GB | error | step, ms | error |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    cluster = Cluster(hardware=HARDWARE["h200"])
    for row in h200_rows():
        job, layout = predict_row(row)
        memory, figures, about = peak(job, layout), row["figures"], row["parameters"]
        copies = copies_of(row)
        pairs = [
            ((memory.state_bytes - copies) / 1e9, figures["state_bytes"] / 1e9),
            ((memory.peak_bytes - copies) / 1e9, figures["peak_bytes"] / 1e9),
            (step_time(job, layout, cluster).total * 1e3, row["median"]),
        ]
        state, top, step = (f"{ours:.4g} / {theirs:.4g}" for ours, theirs in pairs)
        _, top_error, step_error = (f"{ours / theirs - 1:+.1%}" for ours, theirs in pairs)
        name = f"{about['shape'].removeprefix('gpt3-')}, {job.batch} x {job.context:,}"
        name += "" if about["checkpointed"] else ", not checkpointed"
        yield f"| {name} | {row['name']} | {state} | {top} | {top_error} | {step} | {step_error} |"


# This machine

CONFIG: Final = GPTConfig(num_layers=6, width=256, num_heads=8, context=128, vocab_size=512)
BATCH: Final = 8


def layouts_on(num_ranks: int) -> dict[str, Layout]:
    """Return what is tried on so many ranks."""
    if num_ranks == 1:
        return {
            "resident": Layout(micro_batch=BATCH),
            "streamed": Layout(micro_batch=BATCH, weights="streamed"),
            "resident, checkpointed": Layout(micro_batch=BATCH, checkpointing=True),
        }
    own = BATCH // num_ranks
    found = {
        "DDP": Layout(data=num_ranks, micro_batch=own),
        "FSDP2": Layout(data=num_ranks, micro_batch=own, weights="streamed", shard=True),
        "pipeline": Layout(pipe=num_ranks, micro_batch=1),
    }
    if num_ranks == 4:
        found["2 stages x 2"] = Layout(pipe=2, data=2, micro_batch=1)
    return found


def work(rank: int, num_ranks: int, rounds: int) -> dict[str, list[float]]:
    """Return predicted and measured seconds of each layout."""
    if num_ranks > 1:
        samo.mesh(device="cpu")
    machine = Machine(num_ranks)
    layouts = layouts_on(num_ranks)
    with contextlib.ExitStack() as stack:
        steps = {name: step_of(layout, stack) for name, layout in layouts.items()}
        times = in_turns({**machine.calls, **steps}, rounds=rounds)
    cluster = Cluster(hardware=machine.hardware("here", times), num_gpus=num_ranks)
    network = gpt(CONFIG).pruned(0.9)
    job = Job(network=network, batch=BATCH, context=CONFIG.context, dtype="float32")
    return {
        name: [step_time(job, layout, cluster).total, statistics.median(times[name]) / 1e3]
        for name, layout in layouts.items()
    }


def step_of(layout: Layout, stack: contextlib.ExitStack) -> Callable[[], object]:
    """Return a function that trains for one step."""
    torch.manual_seed(0)
    model: Any = GPT(replace(CONFIG, is_checkpointed=layout.checkpointing))
    masks = samo.prune(model, 0.9)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH // layout.data, CONFIG.context))
    if layout.pipe > 1:
        pipeline = samo.Pipeline(
            model,
            lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
            samo.mesh(pipe=layout.pipe, data=layout.data, device="cpu"),
            BATCH // (layout.data * layout.micro_batch),
        )
        stack.callback(pipeline.close)
        model, masks = pipeline.module, pipeline.masks(masks)
    samo.compress_(model, masks, weights=layout.weights)
    whole: Any = model
    if layout.shard:
        for part in (*model.blocks, model):
            fully_shard(part)
    elif layout.data > 1 and layout.pipe == 1:
        whole = DistributedDataParallel(model, gradient_as_bucket_view=True)
    opt = samo.AdamW(model.parameters())

    def step() -> None:
        opt.zero_grad()
        if layout.pipe > 1:
            pipeline.step(tokens, target=tokens)
        else:
            whole(tokens, tokens).backward()
        opt.step()

    return step


def here(counts: list[int], rounds: int) -> None:
    """Print predicted and measured seconds on this machine."""
    print("| ranks | layout | predicted / measured, ms | error |")
    print("| --- | --- | --- | --- |")
    errors = []
    for count in counts:
        for name, (ours, theirs) in ranks.run(count, work, rounds).items():
            error = ours / theirs - 1
            errors.append(abs(error))
            shown = f"{ours * 1e3:.0f} / {theirs * 1e3:.0f}"
            print(f"| {count} | {name} | {shown} | {error:+.0%} |", flush=True)
    print(f"\nmean of absolute errors: {statistics.mean(errors):.0%}")


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["h200", "here"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.what == "h200":
        print(*h200_table(), sep="\n")
    else:
        here(options.ranks, options.rounds)


if __name__ == "__main__":
    main()
