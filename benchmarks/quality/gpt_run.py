"""A GPT in training, and what all runs have in common: sizes, text, learning rate, clock and account.

Shape suffixes: W = windows, S = steps, B = windows of a step, T = bytes of a window.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

import samo
from benchmarks.quality.text import Text, even, order, windows
from samo.memory.predict import TensorSpec, total
from samo.models.gpt import GPT, GPTConfig
from samo.train.config import OptimConfig
from samo.train.learning_rate import learning_rate

DENSE_BYTES: Final = 16
"""Of each parameter of a dense GPT: fp32 weight, gradient and two moments, as torch's AdamW has them."""
WEIGHT_DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs have in common."""

    num_layers: int = 8
    width: int = 512
    num_heads: int = 8
    context: int = 512
    batch: int = 32
    steps: int = 600
    valid_windows: int = 1024
    evaluations: int = 12
    density_power: float = -1.0
    """As samo train has it: pruned tensors learn at the rate over their kept fraction."""
    dense_limit: float = 0.25
    """Part of the run after which a ticket is drawn whether masks have settled or not."""
    text: str = ""
    """Digest of the text, so that rows of different texts are not mixed."""
    train_bytes: int = 0
    valid_bytes: int = 0
    text_source: str = ""

    @property
    def shape(self) -> GPTConfig:
        """The GPT that is pruned."""
        return GPTConfig(
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            context=self.context,
        )

    def every(self, parts: int) -> int:
        """Return the steps from one event to the next, if it comes so many times in a run."""
        return max(self.steps // parts, 1)


QUICK: Final = {
    **{"num_layers": 2, "width": 32, "num_heads": 2, "context": 32, "batch": 4, "steps": 40},
    **{"valid_windows": 16, "evaluations": 4},
}


class Run:
    """A GPT in training: dense at first, and on compressed state once `compress` was called."""

    def __init__(
        self,
        settings: Settings,
        shape: GPTConfig,
        text: Text,
        device: torch.device,
        *,
        seed: int,
        lr: float,
    ) -> None:
        self.settings = settings
        self.seed = seed
        self.lr = lr
        self.ticket = ""
        self.masks: samo.Masks | None = None
        torch.manual_seed(seed)
        self.model = GPT(shape).to(device)
        self.opt: torch.optim.Optimizer = torch.optim.AdamW(
            _decayed(self.model), betas=BETAS, fused=True
        )
        context = settings.context
        self._train = torch.frombuffer(bytearray(text.train), dtype=torch.uint8).to(device)
        self._valid = torch.frombuffer(bytearray(text.valid), dtype=torch.uint8).to(device)
        self._starts_SB = order(
            len(text.train), steps=settings.steps, batch=settings.batch, context=context, seed=seed
        ).to(device)
        self._valid_starts_W = even(
            len(text.valid), count=settings.valid_windows, context=context
        ).to(device)
        self.step = 0
        self.curve: list[list[float]] = []  # tokens, validation loss
        self.states: list[tuple[int, int, float]] = []  # first step with it, bytes, seconds before
        self._measured: samo.Masks | bool | None = False  # the masks of the last measurement
        self._begun = time.perf_counter()
        self._evaluating_s = 0.0

    @property
    def trained_s(self) -> float:
        """Seconds since the run began, less those of evaluations."""
        return time.perf_counter() - self._begun - self._evaluating_s

    def steps(self) -> Iterator[int]:
        """Train, and yield the number of each step that was taken, to the end of the run."""
        optim = OptimConfig(
            state="exact",
            density_power=0.0,
            lr=self.lr,
            warmup_steps=self.settings.every(20),
            weight_decay=WEIGHT_DECAY,
        )
        while self.step < self.settings.steps:
            self._take_step(learning_rate(self.step + 1, self.settings.steps, optim))
            is_last = self.step == self.settings.steps
            if is_last or self.step % self.settings.every(self.settings.evaluations) == 0:
                tokens = self.step * self.settings.batch * self.settings.context
                self.curve.append([tokens, self.evaluate()])
            yield self.step

    def compress(self, masks: samo.Masks, *, entry_steps: bool = False) -> None:
        """Prune the model and continue with compressed state: bfloat16 weights, moments carried over."""
        samo.compress_(self.model, masks, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
        power = self.settings.density_power
        groups = samo.param_groups(
            self.model, lr=1.0, weight_decay=WEIGHT_DECAY, density_power=power
        )
        for group in groups:
            group["lr_scale"] = group.pop("lr")
        opt = samo.AdamW(groups, betas=BETAS, entry_steps=entry_steps)
        opt.carry_over(self.opt)
        self.opt, self.masks = opt, masks

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the text held back, for each byte."""
        if self._valid.is_cuda:
            torch.cuda.synchronize(self._valid.device)
        begun = time.perf_counter()
        size = 2 * self.settings.batch
        losses = [self._loss(self._valid, s_B, "sum") for s_B in self._valid_starts_W.split(size)]
        loss = float(torch.stack(losses).sum()) / (
            len(self._valid_starts_W) * self.settings.context
        )
        self._evaluating_s += time.perf_counter() - begun
        return loss

    def state_bytes(self) -> int:
        """Return the bytes of weights, masks, gradients and moments that are held right now."""
        if self.masks is not None:
            return samo.ledger(self.model, self.opt).measured_bytes
        tensors = [t for p in self.model.parameters() for t in (p, p.grad) if t is not None]
        tensors += [t for s in self.opt.state.values() for k, t in s.items() if k != "step"]
        return sum(tensor.nbytes for tensor in tensors)

    def _take_step(self, lr: float) -> None:
        for group in self.opt.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        loss = self._loss(self._train, self._starts_SB[self.step], "mean")
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.opt.step()
        self.step += 1
        if self._measured is not self.masks:  # only then, and before gradients are dropped
            self.states.append((self.step, self.state_bytes(), self.trained_s))
            self._measured = self.masks
        self.opt.zero_grad()

    def _loss(self, text: Tensor, starts_B: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
        tokens_BT, targets_BT = windows(text, starts_B, self.settings.context)
        is_dense = self.masks is None
        with torch.autocast(text.device.type, torch.bfloat16, enabled=is_dense):
            return self.model(tokens_BT, targets_BT, reduction=reduction)


def matching_shape(shape: GPTConfig) -> GPTConfig:
    """Return the narrowest dense GPT of equal depth whose state is not smaller than that of 90 % pruned.

    Widths are multiples of 8, which tensor cores want: so it may have up to a few percent more.
    """
    with torch.device("meta"):
        pruned = GPT(shape)
    names = set(samo.prunable(pruned))
    specs = [
        TensorSpec(
            numel=p.numel(),
            kept=p.numel() - round(0.9 * p.numel()) if n in names else None,
            grad_dtype="bfloat16",
        )
        for n, p in pruned.named_parameters()
    ]
    wanted = sum(total(specs).values())
    head = shape.width / shape.num_heads
    for width in range(8, shape.width + 1, 8):
        divisors = [n for n in range(1, width + 1) if width % n == 0]
        heads = min(divisors, key=lambda n: abs(width / n - head))
        narrow = GPTConfig(
            num_layers=shape.num_layers, width=width, num_heads=heads, context=shape.context
        )
        with torch.device("meta"):
            numel = sum(p.numel() for p in GPT(narrow).parameters())
        if DENSE_BYTES * numel >= wanted:
            return narrow
    raise AssertionError("a dense GPT of the same width has more state")


def _decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups that `samo.param_groups` makes of a compressed model."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
