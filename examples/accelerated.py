"""Train a pruned GPT with Accelerate: on one device, or on many by ``accelerate launch``.

    accelerate launch examples/accelerated.py

The text is this file.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import samo
from samo.models.gpt import GPT, GPTConfig

accelerator = Accelerator(mixed_precision="no")  # compress_(dtype=) is the mixed precision
torch.manual_seed(0)  # the same weights, and so the same masks, on every rank
model = GPT(GPTConfig(num_layers=2, width=64, num_heads=2, context=32))
samo.compress_(model, samo.prune(model, sparsity=0.9), dtype=torch.bfloat16)  # before prepare
opt = torch.optim.AdamW(samo.param_groups(model, lr=3e-3, weight_decay=0.1))

text = torch.tensor(list(Path(__file__).read_bytes()))
pieces = text.unfold(0, 33, 3)
run, opt, batches = accelerator.prepare(model, opt, DataLoader(pieces, 8, shuffle=True))
for batch in batches:
    opt.zero_grad()
    loss = run(batch[:, :-1], batch[:, 1:])
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(run.parameters(), 1.0)
    opt.step()

if accelerator.is_main_process:
    print(f"loss {loss.item():.3f} by Accelerate")
    print(samo.ledger(model, opt.optimizer))
