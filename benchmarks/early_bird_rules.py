"""When do masks settle, by either distance? Numbers of decision 0013.

    python -m benchmarks.early_bird_rules

A GPT of shape tiny (0.8 M parameters in its blocks) is trained densely on text of this Python's
library, and its masks are taken every 25 steps. For each sparsity and distance: the step at which
the newest of five masks is within 0.1 of the others, and how many of the weights kept then are not
kept at the end of the run.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from samo.data.standard_library import write_library_text
from samo.mask.masks import Masks
from samo.models.gpt import GPT
from samo.models.shapes import SHAPES, GPTConfig
from samo.pruning.early_bird import Distance, Settling, distance_of
from samo.pruning.prune import prune

EVERY, QUEUE, THRESHOLD = 25, 5, 0.1
SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95)
DISTANCES: tuple[Distance, ...] = ("hamming", "kept")


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    taken = observe(arguments.steps, arguments.batch_size)
    print(
        "| sparsity | hamming: step, changed later | kept: step, changed later | random masks, hamming |"
    )
    print("| --- | --- | --- | --- |")
    for sparsity, masks in taken.items():
        cells = [describe(masks, distance) for distance in DISTANCES]
        print(f"| {sparsity} | {' | '.join(cells)} | {2 * sparsity * (1 - sparsity):.3f} |")


def observe(steps: int, batch_size: int) -> dict[float, list[Masks]]:
    """Train a GPT densely, and return the masks of each sparsity, every few steps."""
    shape = SHAPES["tiny"]
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            num_layers=shape.num_layers,
            width=shape.width,
            num_heads=shape.num_heads,
            context=shape.context,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        text = Path(write_library_text(Path(folder))[0]).read_bytes()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    opt = torch.optim.AdamW(model.parameters(), lr=shape.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, shape.lr, steps, pct_start=0.05)
    taken: dict[float, list[Masks]] = {sparsity: [] for sparsity in SPARSITIES}
    for step in range(steps + 1):
        if step % EVERY == 0:
            for sparsity, masks in taken.items():
                masks.append(prune(model, sparsity))
        if step == steps:
            break
        starts = torch.randint(len(tokens) - shape.context - 1, (batch_size, 1))
        batch = tokens[starts + torch.arange(shape.context + 1)].long()
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    print(f"step {steps}: loss {loss.item():.3f}", flush=True)
    return taken


def describe(taken: list[Masks], distance: Distance) -> str:
    """Return when masks settle, and the share of the ticket that is not kept in the end."""
    settling = Settling(QUEUE, THRESHOLD, distance)
    for place, masks in enumerate(taken):
        if settling.add(masks):
            return f"{place * EVERY}, {distance_of(masks, taken[-1]):.0%}"
    return "never"


if __name__ == "__main__":
    main()
