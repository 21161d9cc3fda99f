"""The learning rate of each step of a run."""

import math

from samo.train.config import OptimConfig


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """Return the learning rate of a step, counted from 1 to ``steps``."""
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    # 0 at the end of the warmup, 1 after the last step, which still learns; it stays 1 from there.
    progress = min((step - optim.warmup_steps) / max(steps - optim.warmup_steps + 1, 1), 1.0)
    match optim.schedule:
        case "constant":
            height = 1.0
        case "linear":
            height = 1 - progress
        case "cosine":
            height = 0.5 * (1 + math.cos(math.pi * progress))
        case "wsd":
            height = min((1 - progress) / 0.2, 1.0)
    return optim.lr * (optim.final_lr + (1 - optim.final_lr) * height)
