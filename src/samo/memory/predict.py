"""What a compressed model will hold, by arithmetic alone: imports no torch.

Bytes for each dense parameter at density f (fraction kept), AdamW, no activations:

    kind        bfloat16  float16   float32       what it is
    weights     2         2         4             dense, the model computes with them
    bitmap      0.129     0.129     0.129         the mask; unpruned tensors have none
    gradients   2f        2f        4f            compressed; 4f with fp32 accumulation
    rest        2f        4f        0             remainder (bfloat16) or fp32 master (float16)
    moments     8f        8f        8f            both of AdamW's, fp32
    ages        2f        2f        2f            step counts of entries, only with entry_steps=True

and with lean state, 8 bits for each moment and two fp32 scales for 1,024 entries (256 of an unpruned
tensor):

    rest        f         4f        0             correction (bfloat16) or fp32 master (float16)
    moments     2f+0.008  2f+0.008  2f+0.008      0.031 instead of 0.008 for unpruned tensors

Over R replicas (`samo.replicate`) every rank holds all of this. With sharded state a rank holds rest and
moments of its own part of the kept entries, and the values of that part once more as a vector:

    rest        4f/R      6f/R      4f/R          (values and remainder, or values and master)
    moments     8f/R      8f/R      8f/R

GB is 10**9 bytes everywhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

__all__ = []

Kind = Literal["weights", "bitmap", "gradients", "rest", "moments", "ages"]

KINDS: Final[tuple[Kind, ...]] = ("weights", "bitmap", "gradients", "rest", "moments", "ages")

_BITS_A_PAIR: Final = 64
_BITS_A_BLOCK: Final = 2048

_SIZES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_REST_SIZES: Final = {"bfloat16": 2, "float16": 4, "float32": 0, "float64": 0}
_LEAN_REST_SIZES: Final = {"bfloat16": 1, "float16": 4, "float32": 0}

_GROUP: Final = 1024
_UNPRUNED_GROUP: Final = 256
_SCALE_SIZE: Final = 4
_AGE_SIZE: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One parameter, as far as its bytes go; ``kept=None`` for one without a mask.

    Example:
        >>> from samo.memory.predict import TensorSpec
        >>> TensorSpec(numel=1000, kept=100).is_pruned, TensorSpec(numel=1000, kept=None).is_pruned
        (True, False)
    """

    numel: int
    """Entries of the dense tensor."""
    kept: int | None
    """Entries kept by its mask; None for an unpruned tensor, which has no bitmap."""
    dtype: str = "bfloat16"
    """Type of the weights: bfloat16, float16, float32 or float64."""
    grad_dtype: str = "bfloat16"
    """Type of the compressed gradient."""
    is_trained: bool = True
    """False for a frozen parameter, which holds its weights and its bitmap and nothing else."""
    is_lean: bool = False
    """True for 8-bit optimizer state."""
    has_ages: bool = False
    """True where the optimizer counts the updates of each kept entry; unpruned tensors have none."""
    owned: int | None = None
    """Kept entries whose state this rank holds, where state is sharded and the layout known."""

    def __post_init__(self) -> None:
        for dtype in (self.dtype, self.grad_dtype):
            if dtype not in _SIZES:
                raise ValueError(
                    f"dtype must be the name of one of {', '.join(_SIZES)}, got {dtype!r}"
                )
        if self.is_lean and self.dtype not in _LEAN_REST_SIZES:
            raise ValueError(
                f"lean state is for {', '.join(_LEAN_REST_SIZES)}, got {self.dtype}; use exact state"
            )

    @property
    def is_pruned(self) -> bool:
        """Whether the tensor has a mask."""
        return self.kept is not None


def predict(
    tensor: TensorSpec,
    *,
    moments: int = 2,
    replicas: int = 1,
    shard: Literal["state"] | None = None,
) -> dict[Kind, int]:
    """Return the bytes of one parameter on one rank by kind, with ``moments`` optimizer vectors.

    Example:
        >>> from samo.memory.predict import TensorSpec, predict
        >>> predict(TensorSpec(numel=1_000_000, kept=100_000))
        {'weights': 2000000, 'bitmap': 128912, 'gradients': 200000, 'rest': 200000, 'moments': 800000,
         'ages': 0}
        >>> predict(TensorSpec(numel=1_000_000, kept=100_000, is_lean=True))["moments"]
        207816
        >>> predict(TensorSpec(numel=1_000_000, kept=100_000), replicas=4, shard="state")["moments"]
        200000

    Args:
        tensor: The parameter.
        moments: Vectors that the optimizer keeps for each entry.
        replicas: Ranks with a copy of the model.
        shard: ``"state"`` if each of them holds the state of its own part.
    """
    if replicas < 1:
        raise ValueError(f"replicas must be 1 or more, got {replicas}")
    if shard not in (None, "state"):
        raise ValueError(f"shard must be None or 'state', got {shard!r}")
    kept = tensor.numel if tensor.kept is None else tensor.kept
    trained = kept if tensor.is_trained else 0
    is_sharded = tensor.owned is not None or (shard == "state" and replicas > 1)
    owned = trained
    if is_sharded and tensor.is_trained:
        owned = -(-kept // replicas) if tensor.owned is None else tensor.owned
    bitmap = 0
    if tensor.is_pruned:
        bitmap = 8 * -(-tensor.numel // _BITS_A_PAIR) + 8 * -(-tensor.numel // _BITS_A_BLOCK)
    moment_bytes = max(4, _SIZES[tensor.dtype]) * owned
    rest_sizes = _REST_SIZES
    if tensor.is_lean:
        # A rank's part is a vector without a mask.
        entries, is_pruned = (owned, False) if is_sharded else (tensor.numel, tensor.is_pruned)
        groups = -(-entries // (_GROUP if is_pruned else _UNPRUNED_GROUP))
        moment_bytes = owned + _SCALE_SIZE * groups if tensor.is_trained else 0
        rest_sizes = _LEAN_REST_SIZES
    return {
        "weights": _SIZES[tensor.dtype] * tensor.numel,
        "bitmap": bitmap,
        "gradients": _SIZES[tensor.grad_dtype] * trained,
        "rest": (rest_sizes[tensor.dtype] + is_sharded * _SIZES[tensor.dtype]) * owned,
        "moments": moments * moment_bytes,
        "ages": _AGE_SIZE * trained if tensor.has_ages and tensor.is_pruned else 0,
    }


def total(
    tensors: Iterable[TensorSpec],
    *,
    moments: int = 2,
    replicas: int = 1,
    shard: Literal["state"] | None = None,
) -> dict[Kind, int]:
    """Return the bytes of many parameters on one rank by kind, as `predict` does for one.

    Example:
        >>> from samo.memory.predict import TensorSpec, total
        >>> sum(total([TensorSpec(numel=2048, kept=205), TensorSpec(numel=64, kept=None)]).values())
        7716
    """
    sums: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for tensor in tensors:
        for kind, size in predict(tensor, moments=moments, replicas=replicas, shard=shard).items():
            sums[kind] += size
    return sums


def dense_bytes(tensor: TensorSpec, *, moments: int = 2) -> int:
    """Return what dense training holds for a parameter, with ``moments`` optimizer vectors.

    16-bit weights with Adam: 20 bytes, weights and gradients in 16 and in 32 bit and two fp32 moments,
    the SAMO paper's baseline. Wider weights: weights, gradients and moments of their own type.

    Example:
        >>> from samo.memory.predict import TensorSpec, dense_bytes
        >>> dense_bytes(TensorSpec(numel=10, kept=1))
        200
    """
    size = _SIZES[tensor.dtype]
    if not tensor.is_trained:
        return size * tensor.numel
    return (12 + 4 * moments if size == 2 else (2 + moments) * size) * tensor.numel


def paper_bytes(tensor: TensorSpec) -> int:
    """Return what the SAMO paper's formula gives: 2 + 24 f bytes for each pruned parameter.

    Unpruned tensors are trained densely there. The formula is for 16-bit weights, and is given for
    those whatever the weights' type here.

    Example:
        >>> from samo.memory.predict import TensorSpec, paper_bytes
        >>> paper_bytes(TensorSpec(numel=10, kept=1))
        44
    """
    if tensor.kept is None or not tensor.is_trained:
        return (20 if tensor.is_trained else 2) * tensor.numel
    return 2 * tensor.numel + 24 * tensor.kept
