"""Train a pruned GPT with FSDP2: each rank has its shard of values, gradients and moments.

    torchrun --nproc-per-node 2 examples/fsdp2.py

The text is this file.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import samo
from samo.models.gpt import GPT, GPTConfig

samo.mesh()  # torchrun's ranks: NCCL with a GPU for each, or gloo on CPUs
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)  # the same weights, and so the same masks, on every rank
model = GPT(GPTConfig(num_layers=2, width=64, num_heads=2, context=32)).to(device)
masks = samo.prune(model, sparsity=0.9)
samo.compress_(model, masks, dtype=torch.bfloat16, weights="streamed")
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in (*model.blocks, model):
    fully_shard(block, mp_policy=policy)
opt = samo.AdamW(samo.param_groups(model, lr=3e-3, weight_decay=0.1))  # after fully_shard

text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
torch.manual_seed(dist.get_rank())  # other batches on every rank
for _ in range(30):
    opt.zero_grad()
    starts = torch.randint(len(text) - 32, (8, 1), device=device)
    pieces = text[starts + torch.arange(33, device=device)]
    loss = model(pieces[:, :-1], pieces[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()

if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f} on {dist.get_world_size()} ranks")
    print(samo.ledger(model, opt))  # of this rank
dist.destroy_process_group()
