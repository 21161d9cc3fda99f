"""The learning rate as a function of the step: nothing to save, nothing to restore. Imports no torch."""

import math

from samo.train.config import OptimConfig

__all__ = ["learning_rate"]


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """Return the learning rate of a step, counted from 1 to ``steps``.

    Example:
        >>> from samo.train.config import OptimConfig
        >>> from samo.train.schedule import learning_rate
        >>> optim = OptimConfig(lr=1.0, warmup_steps=2, schedule="linear", final_lr=0.0)
        >>> [learning_rate(step, 6, optim) for step in range(1, 7)]
        [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]

    Args:
        step: The step about to be taken.
        steps: All steps of the run.
        optim: Resolved settings: numbers in place of "auto".
    """
    assert not isinstance(optim.lr, str)
    assert not isinstance(optim.warmup_steps, str)
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    # 0 at the end of the warm-up, 1 at the last step; longer runs than planned stay at 1
    progress = min((step - optim.warmup_steps) / max(steps - optim.warmup_steps, 1), 1.0)
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
