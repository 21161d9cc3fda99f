"""Compile a pruned GPT whole: forward and backward in one graph each, with CUDA graphs on a GPU.

    python examples/compiled.py

Equal layers with unequal masks (scope="global") share their code. The text is this file.
"""

from pathlib import Path

import torch

import samo
from samo.models.gpt import GPT, GPTConfig

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = GPT(GPTConfig(num_layers=2, width=64, num_heads=2, context=32)).to(device)
masks = samo.prune(model, sparsity=0.9, scope="global")
samo.compress_(model, masks, dtype=torch.bfloat16, weights="streamed")
run = torch.compile(
    model, fullgraph=True, mode="reduce-overhead" if device == "cuda" else "default"
)
opt = samo.AdamW(samo.param_groups(model, lr=3e-3, weight_decay=0.1))

text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
for _ in range(30):
    opt.zero_grad()
    starts = torch.randint(len(text) - 32, (8, 1), device=device)
    pieces = text[starts + torch.arange(33, device=device)]
    torch.compiler.cudagraph_mark_step_begin()  # what the last step's graph returned may go
    loss = run(pieces[:, :-1], pieces[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()

print(f"loss {loss.item():.3f}, compiled")
print(samo.ledger(model, opt))
