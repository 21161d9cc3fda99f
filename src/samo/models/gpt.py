"""A small GPT in plain torch, for `samo train`, examples, tests and benchmarks.

Shape suffixes: B = batch, T = tokens, N = B * T, D = model width, V = vocabulary.
"""

import zlib
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samo.models.shapes import GPTConfig
from samo.models.sum_in_chunks import sum_in_chunks


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and pre-norm blocks, like GPT-2 and GPT-3.

    Example:
        >>> import torch
        >>> from samo.models.gpt import GPT, GPTConfig
        >>> model = GPT(GPTConfig(num_layers=2, width=64, num_heads=2))
        >>> tokens_BT = torch.randint(0, 256, (2, 16))
        >>> loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        seed = _draw_seed()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.is_tied:
            self.head.weight = self.embed.weight
        init_weights(self, config, seed)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Return logits, or with targets, the next token of each token, the cross-entropy.

        Nothing is shifted here: ``model(tokens, tokens)`` would learn to copy.
        """
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.embed(tokens_BT) + self.position(places_T)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.config.is_checkpointed)
        x_BTD = self.norm(x_BTD)
        if targets_BT is None:
            return self.head(x_BTD)
        return self._loss(x_BTD.flatten(0, 1), targets_BT.flatten(), reduction)

    def _loss(self, x_ND: Tensor, targets_N: Tensor, reduction: str) -> Tensor:
        total = sum_in_chunks(self._loss_sum, x_ND, targets_N, vocab_size=self.config.vocab_size)
        # -100 is the default ignore_index of torch's cross-entropy.
        return total / (targets_N != -100).sum() if reduction == "mean" else total

    def _loss_sum(self, x_ND: Tensor, targets_N: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x_ND).float(), targets_N, reduction="sum")


class _Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = _Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x_BTD: Tensor, is_checkpointed: bool = False) -> Tensor:
        # In the block, not around it: a block that is compiled recomputes in its own graph.
        if is_checkpointed and torch.is_grad_enabled():
            return checkpoint(self._residual, x_BTD, use_reentrant=False)
        return self._residual(x_BTD)

    def _residual(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class _Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, width = x_BTD.shape
        heads = self.qkv(x_BTD).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def init_weights(module: nn.Module, config: GPTConfig, seed: int | None = None) -> None:
    """Initialize a part of a GPT, such as one block, from the same distributions as the whole."""
    seed = _draw_seed() if seed is None else seed
    for name, param in module.named_parameters():
        _init_(name, param, config, seed)


def draw_weights(
    config: GPTConfig, keep: Callable[[str], bool], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Return the initial weights whose names ``keep`` accepts, bit for bit those of `GPT(config)`.

    Allocates nothing else, so that a rank can draw its own part of a model that it has no room for.
    """
    seed = _draw_seed()
    with torch.device("meta"):
        shapes = {name: param.shape for name, param in GPT(config).named_parameters() if keep(name)}
    drawn = {name: torch.empty(shape, device=device) for name, shape in shapes.items()}
    for name, param in drawn.items():
        _init_(name, param, config, seed)
    return drawn


def _draw_seed() -> int:
    """Draw the seed of all weights of a model."""
    return int(torch.randint(2**62, (), device="cpu"))


@torch.no_grad()
def _init_(name: str, param: Tensor, config: GPTConfig, seed: int) -> None:
    """Initialize a parameter from a generator of its own, so that it does not depend on others."""
    if param.is_meta:
        return
    if name.endswith("bias"):
        param.zero_()
    elif param.dim() == 1:
        param.fill_(1.0)
    else:
        # The residual stream grows with depth; GPT-2's remedy.
        is_residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
        std = 0.02 / (2 * config.num_layers) ** 0.5 if is_residual else 0.02
        generator = torch.Generator(param.device).manual_seed(seed ^ zlib.crc32(name.encode()))
        param.normal_(std=std, generator=generator)
