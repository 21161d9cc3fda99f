"""The tensors of a network as the planner sees them: matrices of layers, from embedding to head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from samo.models.shapes import SHAPES, GPTConfig, ShapeName

__all__ = ["Layer", "Matrix", "Network", "gpt", "named"]

Kind = Literal["attention", "mlp", "experts", "router", "embedding", "head"]

MAX_LOGITS: Final = 2**27
"""That exist at once in a loss, as `samo.models.chunked_loss` has it."""
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
PRUNED: Final[frozenset[Kind]] = frozenset({"attention", "mlp", "experts"})
"""What `samo.prune` prunes by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """Equal weights of a layer."""

    kind: Kind
    inputs: int
    outputs: int
    count: int = 1
    share: float = 1.0  # of the tokens, that each of them multiplies
    is_lookup: bool = False  # an embedding is not multiplied
    is_tied: bool = False  # is the embedding's weight: a parameter only on another stage
    stack: int = 1  # matrices in one tensor, of experts

    @property
    def numel(self) -> int:
        """Parameters of all of them."""
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True, kw_only=True, eq=False)  # equal blocks are one object, hashed by identity
class Layer:
    """What a pipeline may not cut: the embedding, a block, or the final norm with the head.

    Bytes are for one token and 16-bit activations.
    """

    matrices: tuple[Matrix, ...]
    vectors: tuple[int, ...] = ()  # sizes of biases and norms
    attention_width: int = 0  # heads times their size
    window: int = 0  # of attention, 0 for all tokens
    saved: float = 0.0  # for backward
    traffic: float = 0.0  # read and written in forward besides matrix products
    flow: float = 0.0  # gradients of activations at the widest place in backward
    operators: int = 0  # launched in forward

    @property
    def num_params(self) -> int:
        """Parameters, tied ones not counted."""
        return sum(m.numel for m in self.matrices if not m.is_tied) + sum(self.vectors)

    @property
    def cost(self) -> float:
        """Its weight when a pipeline is cut, as `samo.pipeline.split.parameter_costs` has it."""
        products = sum(m.numel for m in self.matrices if not m.is_lookup)
        lookups = sum(m.numel for m in self.matrices if m.is_lookup)
        return products + 0.01 * (lookups + sum(self.vectors))


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A causal language model: its layers, and how it computes the loss."""

    name: str
    layers: tuple[Layer, ...]  # embedding, blocks, head
    width: int
    vocab_size: int
    context: int  # longest sequence
    max_logits: int = MAX_LOGITS  # at once
    has_chunks: bool = True  # in the last stage of a pipeline, too
    command: str = ""  # what `samo train` calls it; "" for a model of Hugging Face

    @property
    def num_params(self) -> int:
        """Parameters."""
        return sum(layer.num_params for layer in self.layers)

    @property
    def blocks(self) -> tuple[Layer, ...]:
        """The layers between embedding and head."""
        return self.layers[1:-1]

    @property
    def is_tied(self) -> bool:
        """Whether the head shares the embedding's weight."""
        return any(matrix.is_tied for matrix in self.layers[-1].matrices)

    def logits(self, tokens: int, pipe: int = 1) -> int:
        """Return how many logits exist at once."""
        if pipe > 1 and not self.has_chunks:
            return tokens * self.vocab_size
        chunk = 1 << max(self.max_logits // self.vocab_size, 1).bit_length() - 1
        return min(tokens, chunk) * self.vocab_size


def gpt(config: GPTConfig, name: str = "gpt", command: str = "") -> Network:
    """Return the network of samo's own GPT.

    Example:
        >>> from samo.models.shapes import GPTConfig
        >>> from samo.planner.network import gpt
        >>> gpt(GPTConfig(num_layers=2, width=64, num_heads=2)).num_params
        149248
    """
    d, vocab = config.width, config.vocab_size
    block = Layer(
        matrices=(
            Matrix(kind="attention", inputs=d, outputs=3 * d),
            Matrix(kind="attention", inputs=d, outputs=d),
            Matrix(kind="mlp", inputs=d, outputs=4 * d),
            Matrix(kind="mlp", inputs=4 * d, outputs=d),
        ),
        vectors=(d, d, 3 * d, d, d, d, 4 * d, d),
        attention_width=d,
        saved=32 * d,  # norms and their inputs 8, qkv 6, attention 2, before and after GELU 16
        traffic=40 * d,  # norms 8, GELU 16, residuals 12, attention's output 4
        flow=10 * d,  # of the second product's output, and of its input
        operators=25,
    )
    embeddings = (
        Matrix(kind="embedding", inputs=d, outputs=vocab, is_lookup=True),
        Matrix(kind="embedding", inputs=d, outputs=config.context, is_lookup=True),
    )
    head = Matrix(kind="head", inputs=d, outputs=vocab, is_tied=config.is_tied)
    return Network(
        name=name,
        layers=(
            Layer(matrices=embeddings, traffic=6 * d, operators=5),
            *[block] * config.num_layers,
            Layer(matrices=(head,), vectors=(d, d), saved=4 * d, traffic=4 * d, operators=10),
        ),
        width=d,
        vocab_size=vocab,
        context=config.context,
        command=command,
    )


def named(name: ShapeName, vocab_size: int = 0) -> Network:
    """Return a named shape; its vocabulary is GPT-2's by default, and bytes for the small ones.

    Example:
        >>> from samo.planner.network import named
        >>> round(named("gpt3-13b").num_params / 1e9, 1)
        13.1
    """
    shape = SHAPES[name]
    config = GPTConfig(
        num_layers=shape.num_layers,
        width=shape.width,
        num_heads=shape.num_heads,
        context=shape.context,
        vocab_size=vocab_size or (50_304 if name.startswith("gpt3") else 256),
    )
    return gpt(config, name, f"--shape {name}")


def sparsities(sparsity: float, rules: Mapping[str, float] | None = None) -> dict[Kind, float]:
    """Return the sparsity of each kind of matrix: one number for those that are pruned by default.

    Example:
        >>> from samo.planner.network import sparsities
        >>> sparsities(0.9, {"attention": 0.5})["mlp"]
        0.9
    """
    found: dict[Kind, float] = {kind: sparsity if kind in PRUNED else 0.0 for kind in KINDS}
    for kind, value in (rules or {}).items():
        if kind not in found:
            raise ValueError(f"unknown kind of matrix '{kind}'; choose among {', '.join(KINDS)}")
        found[kind] = value
    for kind, value in found.items():
        if not 0 <= value < 1:
            raise ValueError(f"sparsity of {kind} must be 0 or more and less than 1, got {value}")
    return found
