"""Train LoRA adapters with peft on a pruned base that stays compressed, and merge them.

    pip install peft
    python examples/lora.py

A tiny Llama with random weights stands in for yours; the text is this file.
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import samo

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
torch.manual_seed(0)
base = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=2, **sizes))
masks = samo.prune(base, sparsity=0.9)
# 0.33 bytes a pruned weight: a bit of the mask, and 16 bits of each kept value.
bfloat16 = {"dtype": torch.bfloat16, "value_dtype": torch.bfloat16}
samo.compress_(base, masks, weights="streamed", **bfloat16)
model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
adapters = [param for param in model.parameters() if param.requires_grad]
opt = torch.optim.AdamW(adapters, lr=1e-2)

text = torch.tensor(list(Path(__file__).read_bytes()))
for _ in range(30):
    opt.zero_grad()
    pieces = text[torch.randint(len(text) - 32, (8, 1)) + torch.arange(32)]
    loss = model(input_ids=pieces, labels=pieces).loss
    loss.backward()
    opt.step()
print(f"loss {loss.item():.3f} by peft")
print(samo.ledger(model, opt))

# The product of two adapters is dense, and so is a merged weight. On a compressed base, merging
# would change the kept values alone.
samo.decompress_(model)
merged = model.merge_and_unload()  # computes what base and adapters did together
masks.apply_(merged)  # pruned again, which changes what it computes; leave it out to stay dense
print(f"merged: {samo.Masks.from_zeros(merged)}")
