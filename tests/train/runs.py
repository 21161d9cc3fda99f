"""Fake run folders with plausible curves, for the tests of what reads them."""

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

SHAPES = {
    "attention.qkv.weight": (384, 128),
    "attention.out.weight": (128, 128),
    "mlp.0.weight": (512, 128),
    "mlp.2.weight": (128, 512),
}
UNPRUNED = 81_920
NUM_PARAMS = 868_352
STARTED = "2026-11-15T11:02:03+00:00"


def write_run(
    folder: Path,
    *,
    name: str = "notes",
    mode: str = "samo",
    dtype: str = "float32",
    steps: int = 300,
    prune_at: int = 100,
    sparsity: float = 0.9,
    every: int = 1,
    eval_every: int = 50,
    sample: str | None = None,
    end: str | None = "done",
    with_state: bool = True,
    masks: Masks | None = None,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run folder as the training loop would, and return it; ``changes`` go into run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    count = NUM_PARAMS if masks is None else masks.numel + UNPRUNED
    about = describe(name, mode=mode, dtype=dtype, steps=steps, sparsity=sparsity, seed=seed)
    (folder / "run.json").write_text(
        json.dumps(about | {"model": {"num_params": count}} | dict(changes or {})), encoding="utf-8"
    )
    lines: list[dict[str, Any]] = [{"event": "start", "step": 0, "time": 1763200000.0}]
    pruned = mode != "dense"
    chance = random.Random(seed)
    for step in range(1, steps + 1):
        phase = mode if pruned and step > prune_at else "dense"
        curve = mean_loss(step, prune_at if pruned else steps + 1, mode)
        if step % every == 0 or step == 1:
            lines.append(step_line(step, phase, curve + chance.gauss(0, 0.05), chance))
        if eval_every and (step % eval_every == 0 or step == steps):
            lines.append(eval_line(step, curve + 0.06))
        if pruned and step == prune_at:
            numel = NUM_PARAMS - UNPRUNED if masks is None else masks.numel
            kept = round(numel * (1 - sparsity)) if masks is None else masks.kept
            lines.append({"event": "prune", "step": step, "kept": kept, "numel": numel})
            if mode == "samo" and with_state:
                lines.append(state_line(step + 1, kept, numel, dtype))
    if sample is not None:
        lines.append({"event": "sample", "step": steps, "text": sample})
    if end is not None:
        lines.append({"event": "end", "step": steps, "reason": end})
    write_metrics(folder, lines)
    if masks is not None:
        masks.save(folder / "masks.safetensors")
    return folder


def write_metrics(folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def describe(
    name: str, *, mode: str, dtype: str, steps: int, sparsity: float, seed: int
) -> dict[str, Any]:
    return {
        "format": "samo-run",
        "version": 1,
        "name": name,
        "command": f"samo train notes.txt --run.mode {mode}",
        "started": STARTED,
        "config": {
            "data": {"path": "notes.txt", "batch_size": 16, "context": 128},
            "model": {"shape": "tiny", "num_layers": 4, "width": 128, "num_heads": 4},
            "prune": {"sparsity": sparsity, "method": "magnitude", "scope": "tensor"},
            "optim": {"lr": 0.001, "weight_decay": 0.1, "betas": [0.9, 0.95]},
            "run": {"mode": mode, "steps": steps, "seed": seed, "dtype": dtype},
        },
        "data": {"train_tokens": 4_000_000, "valid_tokens": 400_000, "tokenizer": "bytes"},
        "versions": {"samo": "0.1.0", "python": "3.11.2", "torch": "2.13.0"},
        "hardware": {
            "device": "cpu",
            "device_name": "AMD EPYC 9B14",
            "cores": 2,
            "memory_bytes": 24_000_000_000,
        },
    }


def mean_loss(step: int, prune_at: int, mode: str) -> float:
    fall = 1.5 + 4.0 / (1 + step / 12) ** 0.6
    if step <= prune_at:
        return fall
    return fall + 0.08 + 0.6 * math.exp(-(step - prune_at) / (0.15 * prune_at))


def step_line(step: int, phase: str, loss: float | None, chance: random.Random) -> dict[str, Any]:
    rate = {"dense": 16_900.0, "samo": 16_800.0}[phase] * chance.gauss(1, 0.02)
    return {
        "event": "step",
        "step": step,
        "phase": phase,
        "loss": loss,
        "lr": 0.001,
        "grad_norm": 0.8,
        "tokens": 2048 * step,
        "epoch": 2048 * step / 4_000_000,
        "tokens_per_s": rate,
        "step_ms": 2_048_000 / rate,
        "memory_bytes": 512_000_000,
        "skipped_steps": 0,
        "elapsed_s": 0.122 * step,
    }


def eval_line(step: int, loss: float) -> dict[str, Any]:
    return {
        "event": "eval",
        "step": step,
        "valid_loss": loss,
        "perplexity": math.exp(loss),
        "tokens": 2048 * step,
        "elapsed_s": 0.122 * step,
    }


def state_line(step: int, kept: int, numel: int, dtype: str) -> dict[str, Any]:
    specs = [
        TensorSpec(numel=numel, kept=kept, dtype=dtype, grad_dtype=dtype),
        TensorSpec(numel=UNPRUNED, kept=None, dtype=dtype, grad_dtype=dtype),
    ]
    kinds = total(specs)
    return {
        "event": "state",
        "step": step,
        "num_params": numel + UNPRUNED,
        "measured_bytes": sum(kinds.values()),
        "predicted_bytes": sum(kinds.values()),
        "dense_bytes": sum(map(dense_bytes, specs)),
        "paper_bytes": sum(map(paper_bytes, specs)),
        "measured": kinds,
        "predicted": kinds,
        "rank_bytes": [sum(kinds.values())],
    }


def fake_masks(*, num_layers: int = 4, density: float = 0.1, seed: int = 0) -> Masks:
    """Masks in which some rows and columns are kept more than others, as magnitude pruning leaves them."""
    chance = torch.Generator().manual_seed(seed)
    masks = {}
    for layer in range(num_layers):
        for kind, shape in SHAPES.items():
            rows, columns = (torch.rand(n, generator=chance) + 0.3 for n in shape)
            scores = torch.rand(shape, generator=chance) * rows[:, None] * columns[None, :]
            share = density * (0.8 + 0.5 * layer / num_layers)
            limit = scores.flatten().kthvalue(round((1 - share) * scores.numel())).values
            masks[f"blocks.{layer}.{kind}"] = Mask.from_bool(scores > limit)
    return Masks(masks)
