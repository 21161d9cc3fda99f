"""Run folders with plausible curves, written through the events of training."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from samo.memory.predict import TensorSpec, total
from samo.train import events as ev
from samo.train.events import Event

UNPRUNED = 81_920
NUMEL = 786_432
NUM_PARAMS = NUMEL + UNPRUNED
KEPT = 78_643
PRUNED_AT = 100


def write_run(
    folder: Path,
    *,
    name: str = "notes",
    mode: str = "samo",
    steps: int = 300,
    sparsity: float = 0.9,
    reason: str = "dense_steps",
    eval_every: int = 50,
    rank_bytes: Iterable[int] = (),
    sample: str | None = None,
    end: str | None = "done",
    seed: int = 0,
    more: Iterable[Event] = (),
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run folder with ``more`` events among the others, and ``changes`` in run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "format": "samo-run",
        "version": 1,
        "name": name,
        "command": f"samo train notes.txt --mode {mode}",
        "started": "2026-11-15T11:02:03+00:00",
        "config": {
            "optim": {"lr": 0.001, "betas": [0.9, 0.95]},
            "run": {"mode": mode, "steps": steps, "seed": seed, "dtype": "float32"},
        },
        "model": {"num_params": NUM_PARAMS},
        "data": {"train_tokens": 4_000_000, "tokenizer": "bytes"},
        "versions": {"samo": "0.2.0", "torch": "2.13.0"},
        "hardware": {"device": "cpu", "device_name": "AMD EPYC 9B14"},
    }
    (folder / "run.json").write_text(json.dumps(about | dict(changes or {})))
    events: list[Event] = [ev.Started(step=0, steps=steps, time=1763200000.0)]
    kept = round(NUMEL * (1 - sparsity))
    is_pruned = mode != "dense"
    for step in range(1, steps + 1):
        is_after = is_pruned and step > PRUNED_AT
        loss = 1.5 + 4.0 / (1 + step / 12) ** 0.6
        if is_after:
            loss += 0.08 + 0.6 * math.exp((PRUNED_AT - step) / 15)
        phase = "samo" if is_after else "dense"
        events.append(stepped(step, loss, phase))
        if eval_every and (step % eval_every == 0 or step == steps):
            events.append(evaluated(step, loss + 0.06))
        if is_pruned and step == PRUNED_AT:
            events.append(pruned(step, kept, reason=reason))
            events.append(accounted(step + 1, kept, rank_bytes))
    if sample is not None:
        events.append(ev.Sampled(step=steps, prompt="Once upon", text=sample))
    events = sorted([*events, *more], key=lambda event: event.step)  # keeps the order of equals
    if end is not None:
        why: Any = end
        events.append(ev.Ended(step=max(steps, events[-1].step), reason=why))
    write_events(folder, events)
    return folder


def write_events(folder: Path, events: Iterable[Event]) -> Path:
    text = "".join(event.to_json() + "\n" for event in events)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def stepped(
    step: int, loss: float = 2.0, phase: str = "dense", tokens_per_s: float = 16_850.0
) -> ev.Stepped:
    return ev.Stepped(
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


def evaluated(step: int, loss: float) -> ev.Evaluated:
    sofar: Any = {"step": step, "tokens": 2048 * step, "elapsed_s": 0.122 * step}
    return ev.Evaluated(valid_loss=loss, perplexity=math.exp(loss), **sofar)


def pruned(step: int, kept: int = KEPT, *, reason: str = "dense_steps") -> ev.Pruned:
    return ev.Pruned(
        step=step,
        kept=kept,
        numel=NUMEL,
        sparsity=1 - kept / NUMEL,
        reason=reason,  # type: ignore[arg-type]
        distances=[],
        threshold=None,
    )


def accounted(step: int, kept: int = KEPT, rank_bytes: Iterable[int] = ()) -> ev.Accounted:
    sizes = ((NUMEL, kept), (UNPRUNED, None))
    specs = [TensorSpec(numel=numel, kept=kept, dtype="float32") for numel, kept in sizes]
    kinds = {str(kind): size for kind, size in total(specs).items()}
    return ev.Accounted(
        step=step,
        num_params=NUM_PARAMS,
        measured_bytes=sum(kinds.values()),
        predicted_bytes=sum(kinds.values()),
        dense_bytes=sum(total(specs, "dense").values()),
        paper_bytes=sum(total(specs, "paper").values()),
        measured=kinds,
        predicted=kinds,
        weights="resident",
        rank_bytes=list(rank_bytes) or [sum(kinds.values())],
    )


def observed(count: int, queue: int = 5) -> list[ev.Observed]:
    """Comparisons every 10 steps; masks get closer with time."""
    found = []
    for i in range(count):
        near = [0.02 + (i - j) * 0.4 / (i + 1) for j in range(i)][-(queue - 1) :]
        rule: Any = {"threshold": 0.1, "queue": queue, "largest": max(near, default=None)}
        found.append(ev.Observed(step=10 * (i + 1), distances=near, **rule))
    return found


def remapped(step: int, before: int, kept: int, grown: int = 0) -> ev.Remapped:
    sizes: Any = {"kept": kept, "numel": NUMEL, "sparsity": 1 - kept / NUMEL}
    return ev.Remapped(step=step, dropped=before + grown - kept, grown=grown, **sizes)


def gradual() -> list[ev.Remapped]:
    """Changes of masks that begin with all weights."""
    sizes = [NUMEL, 400_000, 100_000, KEPT]
    return [remapped(150 + 50 * i, sizes[i], sizes[i + 1]) for i in range(3)]
