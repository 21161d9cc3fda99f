"""The whole idea in one file: train a small GPT, prune it to 90 %, train on with compressed state.

    .venv/bin/python examples/minimal.py

Runs on a CPU and downloads nothing: the text is the source code of Python's own standard library,
read as bytes. Look at `main`; the rest is what any training script has.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import samo
from samo.models.gpt import GPT, GPTConfig

BATCH, CONTEXT = 16, 64


def main() -> None:
    """Train densely, prune, compress, train on, and show where the bytes are."""
    torch.manual_seed(0)
    train_text, valid_text = read_text()
    model = GPT(GPTConfig(num_layers=4, width=128, num_heads=4, context=CONTEXT))

    # 1. A short dense phase, with torch's own optimizer. A trained model would do as well.
    dense_opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train("dense ", model, dense_opt, train_text, steps=100)
    print(f"dense   validation loss {validate(model, valid_text):.3f}")
    del dense_opt  # and with it the state of the weights that are pruned now

    # 2. Choose the weights to keep: here the largest tenth of each matrix.
    masks = samo.prune(model, sparsity=0.9)
    print(masks)

    # 3. From here on the parameters are the kept values, with gradients and moments of their size.
    samo.compress_(model, masks)
    print(f"pruned  validation loss {validate(model, valid_text):.3f}")

    # 4. Train on, with the same loop.
    opt = samo.AdamW(samo.param_groups(model, lr=2e-3, weight_decay=0.1))
    train("pruned", model, opt, train_text, steps=300)
    print(f"pruned  validation loss {validate(model, valid_text):.3f}")

    # 5. The account of every byte of model state, measured on the tensors that are there.
    print(samo.ledger(model, opt))


def train(title: str, model: GPT, opt: Optimizer, text: Tensor, steps: int) -> None:
    """Run an ordinary training loop: forward, backward, clip, step."""
    schedule = CosineAnnealingLR(opt, steps)
    losses = []
    for step in range(1, steps + 1):
        loss = model(*draw_batch(text))
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"{title}  step {step:3}  loss {sum(losses[-50:]) / 50:.3f}")


@torch.no_grad()
def validate(model: GPT, text: Tensor) -> float:
    """Return the mean loss on pieces of a text, the same ones every time."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        losses = [model(*draw_batch(text)).item() for _ in range(20)]
    return sum(losses) / len(losses)


def draw_batch(text: Tensor) -> tuple[Tensor, Tensor]:
    """Return random pieces of a text, and for each byte the one that follows."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
    pieces = text[starts + torch.arange(CONTEXT + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


def read_text() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and, from every tenth file, the bytes to validate on."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    valid = files[::10]
    return as_bytes(file for file in files if file not in valid), as_bytes(valid)


def as_bytes(files: Iterable[Path]) -> Tensor:
    """Return the bytes of some files, one after the other."""
    text = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8)


if __name__ == "__main__":
    main()
