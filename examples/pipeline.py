"""Cut a Hugging Face model into pipeline stages, prune it, and train on what is left.

    torchrun --nproc-per-node 2 examples/pipeline.py

A tiny Llama with random weights stands in for yours; the text is this file.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import samo


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compare a micro-batch's logits with its next tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


mesh = samo.mesh(pipe=2)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
torch.manual_seed(0)  # the same weights, and so the same masks, on every rank
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads, tie_word_embeddings=True))
masks = samo.prune(model, sparsity=0.8)
pipeline = samo.Pipeline(model, loss_fn, mesh, micro_batches=4)
samo.compress_(pipeline.module, pipeline.masks(masks))  # this rank's layers
opt = samo.AdamW(samo.param_groups(pipeline.module, lr=3e-3, weight_decay=0.1))

text = torch.tensor(list(Path(__file__).read_bytes()), device=pipeline.device)
for _ in range(30):
    opt.zero_grad()
    pieces = text[torch.randint(len(text) - 32, (8, 1)) + torch.arange(33)]
    loss = pipeline.step(pieces[:, :-1], target=pieces[:, 1:])
    pipeline.clip_grad_norm_(1.0)
    opt.step()

if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f} on {pipeline.num_stages} stages")
    print(samo.ledger(pipeline.module, opt))
pipeline.close()
dist.destroy_process_group()
