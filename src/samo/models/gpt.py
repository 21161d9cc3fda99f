"""A small GPT in plain torch, for examples, tests and benchmarks. Nothing in samo depends on it.

Shape suffixes: B = batch, T = tokens, D = model width, V = vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samo.models.shapes import GPTConfig

__all__ = ["GPT", "GPTConfig", "draw_weights", "init_weights"]

_MAX_LOGITS: Final = 2**27
"""Logits that exist at once when a loss is computed: 2 GB with their gradients."""
_IGNORE: Final = -100
"""The target that torch's cross-entropy leaves out."""


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and pre-norm blocks, as GPT-2 and GPT-3.

    Example:
        >>> import torch
        >>> from samo.models.gpt import GPT, GPTConfig
        >>> model = GPT(GPTConfig(num_layers=2, width=64, num_heads=2))
        >>> tokens_BT = torch.randint(0, 256, (2, 16))
        >>> model(tokens_BT).shape
        torch.Size([2, 16, 256])
        >>> model(tokens_BT[:, :-1], tokens_BT[:, 1:]).shape
        torch.Size([])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        init_weights(self, config)
        if config.is_tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Return logits, or the cross-entropy if targets are given: for each token the next one.

        Nothing is shifted here: ``model(tokens, tokens)`` would learn to copy. Targets of -100 do not
        count, as everywhere in torch.
        """
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.embed(tokens_BT) + self.position(places_T)
        for block in self.blocks:
            if self.config.is_checkpointed and torch.is_grad_enabled():
                x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
            else:
                x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        if targets_BT is None:
            return self.head(x_BTD)
        return self._loss(x_BTD.flatten(0, 1), targets_BT.flatten(), reduction)

    def _loss(self, x_ND: Tensor, targets_N: Tensor, reduction: str) -> Tensor:
        """Return the loss of many tokens without the logits of all of them.

        With a large vocabulary logits and their gradients would take more memory than the whole state
        of a pruned model. So they are computed a part of the tokens at a time, and again in backward.
        """
        size = 1 << max(_MAX_LOGITS // self.config.vocab_size, 1).bit_length() - 1
        if len(targets_N) <= size:
            return F.cross_entropy(self.head(x_ND).float(), targets_N, reduction=reduction)
        parts = zip(x_ND.split(size), targets_N.split(size))
        total = torch.stack(
            [checkpoint(self._loss_sum, x, y, use_reentrant=False) for x, y in parts]
        ).sum()
        return total / (targets_N != _IGNORE).sum() if reduction == "mean" else total

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

    def forward(self, x_BTD: Tensor) -> Tensor:
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


def init_weights(module: nn.Module, config: GPTConfig) -> None:
    """Draw the weights of a part of a GPT, such as one block, as the whole model draws them.

    Example:
        >>> from samo.models.gpt import GPT, GPTConfig, init_weights
        >>> model = GPT(GPTConfig(num_layers=1, width=64, num_heads=2))
        >>> init_weights(model.blocks[0], model.config)
        >>> round(model.blocks[0].attention.out.weight.std().item(), 3)
        0.014
    """
    module.apply(_init)
    for part in module.modules():
        if isinstance(part, _Block):  # the residual stream grows with depth; GPT-2's remedy
            _init_residual(part, config)


@torch.no_grad()
def draw_weights(
    config: GPTConfig, keep: Callable[[str], bool], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Draw the weights of a GPT as its constructor does, and return those that ``keep`` wants.

    They are equal bit for bit, for the same seed and device. No more than one block and one table are
    held beside them, so that one rank can draw its own part of a model that has no room there.

    Example:
        >>> import torch
        >>> from samo.models.gpt import GPT, GPTConfig, draw_weights
        >>> config = GPTConfig(num_layers=2, width=64, num_heads=2)
        >>> _ = torch.manual_seed(0)
        >>> drawn = draw_weights(config, lambda name: name.startswith("blocks.1."))
        >>> _ = torch.manual_seed(0)
        >>> torch.equal(drawn["blocks.1.mlp.0.weight"], GPT(config).blocks[1].mlp[0].weight)
        True

    Args:
        config: The shape.
        keep: Called with the name of each parameter.
        device: Where to draw.
    """
    paths = [
        "embed",
        "position",
        *(f"blocks.{i}" for i in range(config.num_layers)),
        "norm",
        "head",
    ]
    with torch.device("meta"):
        whole = GPT(config)
    if config.is_tied:  # the head draws weights of its own, which the embedding's then replace
        whole.head = nn.Linear(config.width, config.vocab_size, bias=False, device="meta")

    def constructed() -> Iterator[nn.Module]:
        yield nn.Embedding(config.vocab_size, config.width)
        yield nn.Embedding(config.context, config.width)
        for _ in range(config.num_layers):
            yield _Block(config)
        yield nn.Linear(config.width, config.vocab_size, bias=False)

    with torch.device(device):
        for module in constructed():  # which draws once, before `init_weights` draws again
            del module
    kept: dict[str, nn.Module] = {}
    scratch: nn.Module | None = None
    for path in paths:
        module = whole.get_submodule(path)
        is_kept = any(keep(f"{path}.{name}") for name, _ in module.named_parameters())
        is_kept &= not (config.is_tied and path == "head")
        if isinstance(module, _Block) and not is_kept and scratch is not None:
            module = scratch
        else:
            module = module.to_empty(device=device)
        for part in module.modules():
            if isinstance(part, nn.LayerNorm):
                part.reset_parameters()  # draws nothing
        module.apply(_init)
        if is_kept:
            kept[path] = module
        elif isinstance(module, _Block):
            scratch = module
        else:
            module.to_empty(device="meta")  # `whole` still refers to it
    for path in paths:
        if path.startswith("blocks."):
            block = kept.get(path, scratch)
            assert isinstance(block, _Block)
            _init_residual(block, config)
    return {
        f"{path}.{name}": param.detach()
        for path, module in kept.items()
        for name, param in module.named_parameters()
        if keep(f"{path}.{name}")
    }


def _init_residual(block: "_Block", config: GPTConfig) -> None:
    for layer in (block.attention.out, block.mlp[2]):
        nn.init.normal_(layer.weight, std=0.02 / (2 * config.num_layers) ** 0.5)  # type: ignore[arg-type]


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
