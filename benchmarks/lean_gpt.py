"""Does a small GPT reach the same loss with lean state as with exact state? Numbers of decision 0012.

    python -m benchmarks.lean_gpt

Two layers, width 96, bfloat16, 90 % of every matrix pruned at random, on bytes of Python's standard
library: a schedule with warm-up, clipping and weight decay. Some 12 minutes on one core of a CPU.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import samo
from samo.models.gpt import GPT, GPTConfig

LENGTH, BATCH, LR = 64, 12, 3e-3


def read_bytes() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.int64)


def draw(data: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH,), generator=generator)
    return torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])


def validation_loss(
    state: Literal["exact", "lean"], seed: int, beta2: float, steps: int, data: Tensor
) -> float:
    """Train and return the loss on the last 5 % of the data."""
    cut = int(0.95 * len(data))
    torch.manual_seed(seed)
    model = GPT(GPTConfig(num_layers=2, width=96, num_heads=4, vocab_size=256, context=LENGTH))
    masks = samo.prune(model, 0.9, method="random")
    values = torch.bfloat16 if state == "lean" else torch.float32
    samo.compress_(model, masks, dtype=torch.bfloat16, value_dtype=values)
    groups = samo.param_groups(model, weight_decay=0.1)
    opt = samo.AdamW(groups, lr=LR, betas=(0.9, beta2), state=state)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in opt.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / steps)
        tokens = draw(data[:cut], generator)
        opt.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        batches = [draw(data[cut:], generator) for _ in range(20)]
        losses = [float(model(tokens[:, :-1], tokens[:, 1:])) for tokens in batches]
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    data = read_bytes()
    print("| beta2 | seed | exact | lean |\n| --- | --- | --- | --- |")
    for beta2 in (0.999, 0.95):
        for seed in range(options.seeds):
            exact = validation_loss("exact", seed, beta2, options.steps, data)
            lean = validation_loss("lean", seed, beta2, options.steps, data)
            print(f"| {beta2} | {seed} | {exact:.4f} | {lean:.4f} |", flush=True)


if __name__ == "__main__":
    main()
