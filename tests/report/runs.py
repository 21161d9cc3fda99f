"""Run folders with plausible curves, written through the events of training."""

import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.memory.predict import TensorSpec, dense_bytes, paper_bytes, total
from samo.train.events import (
    Accounted,
    Ended,
    Evaluated,
    Event,
    Observed,
    Pruned,
    Remapped,
    Sampled,
    Started,
    Stepped,
)

UNPRUNED = 81_920
NUMEL = 786_432
NUM_PARAMS = NUMEL + UNPRUNED
KEPT = 78_643


def write_run(
    folder: Path,
    *,
    name: str = "notes",
    mode: str = "samo",
    dtype: str = "float32",
    steps: int = 300,
    prune_at: int = 100,
    sparsity: float = 0.9,
    reason: str = "dense_steps",
    eval_every: int = 50,
    rank_bytes: Iterable[int] = (),
    sample: str | None = None,
    end: str | None = "done",
    masks: Masks | None = None,
    seed: int = 0,
    more: Iterable[Event] = (),
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run folder and return it.

    ``more`` events are put among the others in the order of steps, ``changes`` into run.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "format": "samo-run",
        "version": 1,
        "name": name,
        "command": f"samo train notes.txt --mode {mode}",
        "started": "2026-11-15T11:02:03+00:00",
        "config": {
            "optim": {"lr": 0.001, "betas": [0.9, 0.95]},
            "run": {"mode": mode, "steps": steps, "seed": seed, "dtype": dtype},
        },
        "model": {"num_params": NUM_PARAMS},
        "data": {"train_tokens": 4_000_000, "tokenizer": "bytes"},
        "versions": {"samo": "0.2.0", "torch": "2.13.0"},
        "hardware": {"device": "cpu", "device_name": "AMD EPYC 9B14"},
    }
    (folder / "run.json").write_text(json.dumps(about | dict(changes or {})))
    events: list[Event] = [Started(step=0, steps=steps, time=1763200000.0)]
    kept = round(NUMEL * (1 - sparsity))
    chance = random.Random(seed)
    is_pruned = mode != "dense"
    for step in range(1, steps + 1):
        is_after = is_pruned and step > prune_at
        loss = 1.5 + 4.0 / (1 + step / 12) ** 0.6
        if is_after:
            loss += 0.08 + 0.6 * math.exp(-(step - prune_at) / (0.15 * prune_at))
        phase = "samo" if is_after else "dense"
        events.append(stepped(step, loss + chance.gauss(0, 0.05), phase, chance.gauss(16_850, 300)))
        if eval_every and (step % eval_every == 0 or step == steps):
            events.append(evaluated(step, loss + 0.06))
        if is_pruned and step == prune_at:
            events.append(pruned(step, kept, reason=reason))
            events.append(accounted(step + 1, kept, dtype, rank_bytes))
    if sample is not None:
        events.append(Sampled(step=steps, text=sample))
    events = sorted([*events, *more], key=lambda event: event.step)  # keeps the order of equals
    if end is not None:
        events.append(Ended(step=max(steps, events[-1].step), reason=end))  # type: ignore[arg-type]
    write_events(folder, events)
    if masks is not None:
        masks.save(folder / "masks.safetensors")
    return folder


def write_events(folder: Path, events: Iterable[Event]) -> Path:
    text = "".join(event.to_json() + "\n" for event in events)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def stepped(
    step: int, loss: float = 2.0, phase: str = "dense", tokens_per_s: float = 16_850.0
) -> Stepped:
    return Stepped(
        step=step,
        phase=phase,  # type: ignore[arg-type]
        loss=loss,
        lr=0.001,
        grad_norm=0.8,
        tokens=2048 * step,
        epoch=2048 * step / 4e6,
        tokens_per_s=tokens_per_s,
        step_ms=2_048_000 / tokens_per_s,
        memory_bytes=512_000_000,
        skipped_steps=0,
        elapsed_s=0.122 * step,
    )


def evaluated(step: int, loss: float) -> Evaluated:
    tokens, elapsed_s = 2048 * step, 0.122 * step
    return Evaluated(
        step=step, valid_loss=loss, perplexity=math.exp(loss), tokens=tokens, elapsed_s=elapsed_s
    )


def pruned(step: int, kept: int = KEPT, *, reason: str = "dense_steps") -> Pruned:
    return Pruned(
        step=step,
        kept=kept,
        numel=NUMEL,
        sparsity=1 - kept / NUMEL,
        reason=reason,  # type: ignore[arg-type]
        distances=[],
        threshold=None,
    )


def accounted(
    step: int, kept: int = KEPT, dtype: str = "float32", rank_bytes: Iterable[int] = ()
) -> Accounted:
    specs = [
        TensorSpec(numel=NUMEL, kept=kept, dtype=dtype, grad_dtype=dtype),
        TensorSpec(numel=UNPRUNED, kept=None, dtype=dtype, grad_dtype=dtype),
    ]
    kinds = {str(kind): size for kind, size in total(specs).items()}
    return Accounted(
        step=step,
        num_params=NUM_PARAMS,
        measured_bytes=sum(kinds.values()),
        predicted_bytes=sum(kinds.values()),
        dense_bytes=sum(map(dense_bytes, specs)),
        paper_bytes=sum(map(paper_bytes, specs)),
        measured=kinds,
        predicted=kinds,
        weights="resident",
        rank_bytes=list(rank_bytes) or [sum(kinds.values())],
    )


def observed(count: int, *, queue: int = 5, history: bool = True) -> list[Observed]:
    """Comparisons every 10 steps; masks get closer with time."""
    found = []
    for i in range(count):
        row = [0.02 + (i - j) * 0.4 / (i + 1) for j in range(i)]
        recent = row[-(queue - 1) :]
        found.append(
            Observed(
                step=10 * (i + 1),
                distances=row if history else recent,
                largest=max(recent, default=None),
                threshold=0.1,
                queue=queue,
            )
        )
    return found


def remapped(step: int, before: int, kept: int, grown: int = 0) -> Remapped:
    dropped = before + grown - kept
    return Remapped(
        step=step, kept=kept, numel=NUMEL, sparsity=1 - kept / NUMEL, dropped=dropped, grown=grown
    )


def gradual() -> list[Remapped]:
    """Changes of masks that begin with all weights."""
    return [
        remapped(150, NUMEL, 400_000),
        remapped(200, 400_000, 100_000),
        remapped(250, 100_000, KEPT),
    ]


def fake_masks(*, num_layers: int = 4, seed: int = 0) -> Masks:
    """Masks that keep more in later layers."""
    chance = torch.Generator().manual_seed(seed)
    shapes = {"attention.qkv": (96, 32), "mlp.0": (128, 32), "mlp.2": (32, 128)}
    masks = {}
    for layer in range(num_layers):
        for kind, shape in shapes.items():
            density = 0.08 + 0.05 * layer / num_layers + 0.01 * len(kind) / 10
            keep = torch.rand(shape, generator=chance) < density
            masks[f"blocks.{layer}.{kind}.weight"] = Mask.from_bool(keep)
    return Masks(masks)
