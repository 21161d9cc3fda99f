"""Fine-tune a pruned language model with Hugging Face's Trainer, and resume it.

    python examples/trainer.py

A tiny Llama with random weights stands in for yours; the text is this file.
"""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import samo

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
torch.manual_seed(0)
dense = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=2, **sizes))
masks = samo.prune(dense, sparsity=0.9)
text = torch.tensor(list(Path(__file__).read_bytes()))
pieces = [{"input_ids": row, "labels": row} for row in text[: len(text) // 32 * 32].view(-1, 32)]
folder = tempfile.mkdtemp()


def trainer(steps: int) -> Trainer:
    """Return a trainer of a compressed copy of the model."""
    model = LlamaForCausalLM(dense.config)
    model.load_state_dict(dense.state_dict())
    samo.compress_(model, masks)  # with the same masks when it resumes
    # TrainingArguments' own learning rate and weight decay have no effect beside an optimizer.
    opt = samo.AdamW(samo.param_groups(model, lr=3e-3, weight_decay=0.1))
    settings = TrainingArguments(
        folder, max_steps=steps, save_steps=20, per_device_train_batch_size=8, report_to=[],
        lr_scheduler_type="constant", logging_steps=10, disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    return Trainer(model, settings, train_dataset=pieces, optimizers=(opt, None))


trainer(20).train()
resumed = trainer(40)
resumed.train(resume_from_checkpoint=True)  # the checkpoint at step 20
losses = [row["loss"] for row in resumed.state.log_history if "loss" in row]
print(f"loss {losses[-1]:.3f} by Trainer, step {resumed.state.global_step}")
print(samo.ledger(resumed.model, resumed.optimizer.optimizer))
