"""Train a pruned GPT with Lightning.

    pip install lightning
    python examples/lightning_module.py

The text is this file.
"""

from pathlib import Path

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import samo
from samo.models.gpt import GPT, GPTConfig


class Pruned(lightning.LightningModule):
    """A GPT that is pruned and compressed from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(GPTConfig(num_layers=2, width=64, num_heads=2, context=32))
        samo.compress_(self.model, samo.prune(self.model, sparsity=0.9), dtype=torch.bfloat16)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        """Return the loss of a batch."""
        loss = self.model(batch[:, :-1], batch[:, 1:])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Decay matrices, whose values are 1-D, and not norms and biases."""
        return torch.optim.AdamW(samo.param_groups(self.model, lr=3e-3, weight_decay=0.1))


torch.manual_seed(0)
module = Pruned()
text = torch.tensor(list(Path(__file__).read_bytes()))
batches = DataLoader(text.unfold(0, 33, 3), 8, shuffle=True)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(
    max_epochs=1, gradient_clip_val=1.0, enable_checkpointing=False, **quiet
)
trainer.fit(module, batches)
print(f"loss {trainer.callback_metrics['loss']:.3f} by Lightning")
print(samo.ledger(module.model, trainer.optimizers[0]))
