"""The shapes of `samo.models.gpt.GPT`, by name: imports no torch.

The GPT-3 family follows Brown et al. 2020, table 2.1, with two rows corrected: 16 heads, not 24, in
a width of 2,048, and a width of 5,120, not 5,140.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The shape of a `GPT`."""

    num_layers: int = 4
    width: int = 128
    num_heads: int = 4  # must divide the width
    context: int = 256  # longest sequence, in tokens
    vocab_size: int = 256  # 256 reads bytes
    is_tied: bool = False  # whether the head shares the embedding's weight
    is_checkpointed: bool = False  # whether to recompute each block's activations in backward

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.width % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide width={self.width}")


class Shape(NamedTuple):
    """A named shape, with the context and the learning rate it is usually trained with."""

    num_layers: int
    width: int
    num_heads: int
    context: int
    lr: float


ShapeName = Literal[
    "tiny", "mini", "small", "gpt3-125m", "gpt3-350m", "gpt3-760m", "gpt3-1.3b", "gpt3-2.7b",
    "gpt3-6.7b", "gpt3-13b", "gpt3-175b",
]  # fmt: skip

SHAPES: Final[dict[ShapeName, Shape]] = {
    "tiny": Shape(4, 128, 4, 128, 2e-3),  # 0.8 M parameters in its blocks: seconds on a laptop
    "mini": Shape(6, 256, 8, 256, 1e-3),  # 4.7 M
    "small": Shape(8, 512, 8, 512, 6e-4),  # 25 M
    "gpt3-125m": Shape(12, 768, 12, 2048, 6e-4),
    "gpt3-350m": Shape(24, 1024, 16, 2048, 3e-4),
    "gpt3-760m": Shape(24, 1536, 16, 2048, 2.5e-4),
    "gpt3-1.3b": Shape(24, 2048, 16, 2048, 2e-4),
    "gpt3-2.7b": Shape(32, 2560, 32, 2048, 1.6e-4),
    "gpt3-6.7b": Shape(32, 4096, 32, 2048, 1.2e-4),
    "gpt3-13b": Shape(40, 5120, 40, 2048, 1e-4),
    "gpt3-175b": Shape(96, 12288, 96, 2048, 6e-5),
}
