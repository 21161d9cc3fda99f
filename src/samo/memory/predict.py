"""The bytes of a parameter while it is trained, by samo and by others: imports no torch.

Bytes for each dense parameter at density f (fraction kept), `samo.AdamW`, no activations:

    kind         bfloat16  float32   lean         what it is
    dense        2         4         2            the dense weight; 0 where it is streamed
    bitmap       0.129     0.129     0.129        the mask
    values       4f        4f        2f           the parameter
    gradients    4f        4f        2f           2f with grad_dtype=torch.bfloat16
    moments      8f        8f        2f + 0.008   both of AdamW's; lean: 8 bits each, and scales
    corrections  0         0         f            remainders of rounding to 16 bits
    ages         2f        2f        0            only with entry_steps=True
    buckets      4f        4f        2f           only with DDP without gradient_as_bucket_view

An unpruned parameter has f = 1 and no bitmap, and a dense copy only if its values are wider than
the compute type. Lean state has two fp32 scales for 1,024 entries, 256 of an unpruned parameter.
Torch's optimizers keep moments in the type of the parameter, and no corrections. GB is 10**9 bytes.

The SAMO paper takes 2 + 24 f bytes. Dense training with 16-bit weights and Adam takes 20, the
paper's baseline: weights and gradients in 16 and in 32 bits, two fp32 moments. Autocast takes 16:
weights, gradients and moments are fp32. 8-bit state, as FlashOptim has it, takes 7.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

Kind = Literal[
    "dense", "bitmap", "values", "gradients", "moments", "corrections", "ages", "buckets"
]

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Scheme = Literal["samo", "paper", "dense", "autocast", "8-bit"]

_SIZES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_OF_16_BITS: Final[dict[Scheme, dict[Kind, int]]] = {
    "dense": {"dense": 2, "values": 4, "gradients": 6, "moments": 4},
    "8-bit": {"values": 3, "gradients": 2, "moments": 1},
}
"""Bytes for each entry of a 16-bit weight, and for each of its moments."""
_GROUP: Final = 1024  # entries that share two scales in lean state
_UNPRUNED_GROUP: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One parameter: its sizes and types; ``kept=None`` for one without a mask."""

    numel: int  # of the dense tensor
    kept: int | None  # None for an unpruned parameter, which has no bitmap
    dtype: str = "bfloat16"  # compute type
    value_dtype: str = ""  # by default float32, or float64 to compute in float64
    grad_dtype: str = ""  # by default that of the values
    is_resident: bool = True  # False if the dense weight is streamed, not kept between uses
    held: int | None = None  # values in this rank's shard, if sharded; the bitmap never is
    is_trained: bool = True  # a frozen parameter has neither gradient nor state
    moments: int = 2  # of the optimizer: 2 for Adam, 1 for SGD with momentum
    # samo.AdamW has fp32 moments whatever the values are, and corrections for 16-bit values.
    optimizer: Literal["samo", "torch"] = "samo"
    is_lean: bool = False  # 8-bit optimizer state
    has_ages: bool = False  # whether the optimizer counts the updates of each kept entry
    has_buckets: bool = False  # whether DDP has gradients of its own

    def __post_init__(self) -> None:
        values = self.value_dtype or ("float64" if self.dtype == "float64" else "float32")
        object.__setattr__(self, "value_dtype", values)
        object.__setattr__(self, "grad_dtype", self.grad_dtype or values)

    @property
    def is_pruned(self) -> bool:
        """Whether the parameter has a mask."""
        return self.kept is not None

    def share_of(self, entries: int) -> int:
        """Return how many of a number of entries are in this rank's shard."""
        whole = self.numel if self.kept is None else self.kept
        return entries if self.held is None else entries * self.held // max(whole, 1)

    @property
    def has_copy(self) -> bool:
        """Whether there is a dense weight besides the values."""
        return self.is_pruned or (self.is_trained and self.dtype != self.value_dtype)


def predict(tensor: TensorSpec, scheme: Scheme = "samo") -> dict[Kind, int]:
    """Return the bytes of one parameter by kind.

    Example:
        >>> from samo.memory.predict import TensorSpec, predict
        >>> predict(TensorSpec(numel=1_000_000, kept=100_000))["moments"]
        800000
        >>> predict(TensorSpec(numel=1_000_000, kept=100_000, is_lean=True))["moments"]
        207816
        >>> sum(predict(TensorSpec(numel=1_000_000, kept=100_000), "dense").values())
        20000000
    """
    if scheme != "samo":
        own = _paper(tensor) if scheme == "paper" else _dense(tensor, scheme)
        return {**dict.fromkeys(KINDS, 0), **own}
    kept = tensor.share_of(tensor.numel if tensor.kept is None else tensor.kept)
    trained = kept if tensor.is_trained else 0
    size = _SIZES[tensor.dtype]
    value_size = _SIZES[tensor.value_dtype] if tensor.has_copy else size
    grad_size = _SIZES[tensor.grad_dtype] if tensor.has_copy else size
    bitmap = corrections = 0
    if tensor.is_pruned:
        # Pairs of words of 32 bits, and a count for each block of 2,048.
        bitmap = 8 * -(-tensor.numel // 64) + 8 * -(-tensor.numel // 2048)
    moment = value_size * trained
    if tensor.optimizer == "samo":
        moment = max(4, value_size) * trained
        if value_size == 2 and tensor.moments:
            corrections = trained if tensor.is_lean else 2 * trained
    if tensor.is_lean and tensor.is_trained:
        groups = -(-tensor.numel // (_GROUP if tensor.is_pruned else _UNPRUNED_GROUP))
        moment = trained + 4 * groups
    return {
        "dense": size * tensor.numel if tensor.has_copy and tensor.is_resident else 0,
        "bitmap": bitmap,
        "values": value_size * kept,
        "gradients": grad_size * trained,
        "moments": tensor.moments * moment,
        "corrections": corrections,
        "ages": 2 * trained if tensor.has_ages and tensor.is_pruned else 0,
        "buckets": value_size * trained if tensor.has_buckets else 0,
    }


def _dense(tensor: TensorSpec, scheme: Scheme) -> dict[Kind, int]:
    size, numel = _SIZES[tensor.dtype], tensor.share_of(tensor.numel)
    if scheme == "autocast":
        size = max(size, 4)
    if not tensor.is_trained:
        return {"values": size * numel}
    each: dict[Kind, int] = {"values": size, "gradients": size, "moments": size}
    if size == 2:  # wider weights have gradients and moments of their own type
        each = _OF_16_BITS[scheme]
    return {
        kind: count * numel * (tensor.moments if kind == "moments" else 1)
        for kind, count in each.items()
    }


def _paper(tensor: TensorSpec) -> dict[Kind, int]:
    if tensor.kept is None or not tensor.is_trained:
        return _dense(tensor, "dense")
    numel, kept = tensor.share_of(tensor.numel), tensor.share_of(tensor.kept)
    # Indices of 4 bytes instead of a bitmap; 2 f of the gradients exist in the update alone.
    return {
        "dense": 2 * numel,
        "bitmap": 4 * kept,
        "values": 6 * kept,
        "gradients": 6 * kept,
        "moments": 8 * kept,
    }


def total(tensors: Iterable[TensorSpec], scheme: Scheme = "samo") -> dict[Kind, int]:
    """Return the bytes of many parameters by kind, as `predict` does for one."""
    sums: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for tensor in tensors:
        for kind, size in predict(tensor, scheme).items():
            sums[kind] += size
    return sums
