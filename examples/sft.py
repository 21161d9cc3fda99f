"""Fine-tune a pruned language model on conversations with TRL's SFTTrainer.

    pip install trl
    python examples/sft.py

A tiny Llama with random weights and bytes as tokens stand in for yours.
"""

import tempfile

import torch
from datasets import Dataset
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

import samo

tokenizer = ByT5Tokenizer()
tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
turns = [[{"role": "user", "content": f"What is {n} + {n}?"},
          {"role": "assistant", "content": f"It is {2 * n}."}] for n in range(160)]  # fmt: skip
data = Dataset.from_dict({"messages": turns})

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, **sizes))
samo.compress_(model, samo.prune(model, sparsity=0.9))
opt = samo.AdamW(samo.param_groups(model, lr=3e-3, weight_decay=0.1))
settings = SFTConfig(
    tempfile.mkdtemp(), max_length=64, num_train_epochs=2, per_device_train_batch_size=8,
    report_to=[], lr_scheduler_type="constant", disable_tqdm=True, save_strategy="no", bf16=False,
    use_cpu=not torch.cuda.is_available(),
)  # fmt: skip
trainer = SFTTrainer(
    model, settings, train_dataset=data, processing_class=tokenizer, optimizers=(opt, None)
)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {losses[-1]:.3f} by SFTTrainer")
print(samo.ledger(model, opt))
