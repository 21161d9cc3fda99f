"""The tensors of a network as the planner sees them: matrices of layers, from embedding to head."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Literal, get_args

from samo.errors import ConfigError
from samo.models.shapes import SHAPES, GPTConfig, ShapeName

Kind = Literal["attention", "mlp", "experts", "router", "embedding", "head"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
ENDS: Final[tuple[Kind, ...]] = ("embedding", "head")
PRUNED: Final[frozenset[Kind]] = frozenset({"attention", "mlp", "experts"})
"""What `samo.prune` prunes by default."""
MAX_LOGITS: Final = 2**27
"""That exist at once in a loss, as `samo.models.sum_in_chunks` has it."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Equal weights of a layer."""

    kind: Kind
    inputs: int
    outputs: int
    _: KW_ONLY
    count: int = 1  # tensors
    stack: int = 1  # matrices in each tensor: experts
    share: float = 1.0  # of the tokens, that each matrix multiplies
    is_lookup: bool = False  # an embedding is not multiplied
    is_tied: bool = False  # is the embedding's weight: a parameter only on another stage
    sparsity: float = 0.0
    is_trained: bool = True

    @property
    def tensor_numel(self) -> int:
        """Parameters of one tensor."""
        return self.inputs * self.outputs * self.stack

    @property
    def numel(self) -> int:
        """Parameters of all of them."""
        return self.tensor_numel * self.count


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
    def matrices(self) -> list[Matrix]:
        """The matrices of all layers."""
        return [matrix for layer in self.layers for matrix in layer.matrices]

    @property
    def sparsity(self) -> dict[Kind, float]:
        """How much is pruned of each kind of matrix."""
        of = {matrix.kind: matrix.sparsity for matrix in self.matrices}
        return {kind: of[kind] for kind in KINDS if kind in of}

    @property
    def frozen(self) -> list[Kind]:
        """The kinds of matrices that are not trained."""
        return sorted({matrix.kind for matrix in self.matrices if not matrix.is_trained})

    def pruned(self, sparsity: float, rules: Mapping[Any, float] | None = None) -> "Network":
        """Return the network with this sparsity where `samo.prune` prunes, or by kind of matrix.

        Example:
            >>> from samo.planner.network import named
            >>> named("tiny").pruned(0.9, {"attention": 0.5}).sparsity
            {'attention': 0.5, 'mlp': 0.9, 'embedding': 0.0, 'head': 0.0}

        Raises:
            ConfigError: A sparsity is out of range, or a kind is not known.
        """
        of: dict[str, float] = {kind: sparsity if kind in PRUNED else 0.0 for kind in KINDS}
        for kind, value in {**of, **(rules or {})}.items():
            if kind not in of:
                raise ConfigError(
                    f"unknown kind of matrix '{kind}'; choose among {', '.join(KINDS)}"
                )
            if not 0 <= value < 1:
                raise ConfigError(
                    f"sparsity of {kind} must be 0 or more and less than 1 (0.9 prunes 90 %), "
                    f"got {value}"
                )
            of[kind] = value
        return self._changed(lambda matrix: replace(matrix, sparsity=of[matrix.kind]))

    def with_frozen(self, kinds: Collection[Kind]) -> "Network":
        """Return the network with kinds of matrices that are not trained.

        Raises:
            ConfigError: One of them is pruned.
        """
        if both := [kind for kind in sorted(kinds) if self.sparsity.get(kind)]:
            raise ConfigError(
                f"{', '.join(both)} cannot be frozen and pruned; leave one of them out"
            )

        def freeze(matrix: Matrix) -> Matrix:
            owner = "embedding" if matrix.is_tied else matrix.kind
            return replace(matrix, is_trained=owner not in kinds)

        return self._changed(freeze)

    def _changed(self, change: Callable[[Matrix], Matrix]) -> "Network":
        new = {
            layer: replace(layer, matrices=tuple(map(change, layer.matrices)))
            for layer in {*self.layers}
        }
        return replace(self, layers=tuple(new[layer] for layer in self.layers))

    def logits(self, tokens: int, pipe: int = 1) -> int:
        """Return how many logits exist at once."""
        if pipe > 1 and not self.has_chunks:
            return tokens * self.vocab_size
        chunk = 1 << max(self.max_logits // self.vocab_size, 1).bit_length() - 1
        return min(tokens, chunk) * self.vocab_size


def gpt(config: GPTConfig, name: str = "gpt", command: str = "") -> Network:
    """Return the network of samo's own GPT."""
    d, vocab = config.width, config.vocab_size
    block = Layer(
        matrices=(
            Matrix("attention", d, 3 * d),
            Matrix("attention", d, d),
            Matrix("mlp", d, 4 * d),
            Matrix("mlp", 4 * d, d),
        ),
        vectors=(d, d, 3 * d, d, d, d, 4 * d, d),
        attention_width=d,
        saved=32 * d,  # norms and their inputs 8, qkv 6, attention 2, before and after GELU 16
        traffic=40 * d,  # norms 8, GELU 16, residuals 12, attention's output 4
        flow=10 * d,  # of the second product's output, and of its input
        operators=25,
    )
    embeddings = (
        Matrix("embedding", d, vocab, is_lookup=True),
        Matrix("embedding", d, config.context, is_lookup=True),
    )
    head = Matrix("head", d, vocab, is_tied=config.is_tied)
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


def named(name: ShapeName) -> Network:
    """Return a named shape; its vocabulary is GPT-2's, or bytes for the small ones."""
    shape = SHAPES[name]
    config = GPTConfig(
        num_layers=shape.num_layers,
        width=shape.width,
        num_heads=shape.num_heads,
        context=shape.context,
        vocab_size=50_304 if name.startswith("gpt3") else 256,
    )
    return gpt(config, name, f"--shape {name}")
