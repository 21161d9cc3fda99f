"""What the stages of a pipeline hold becomes what one process would have: who gives what. No torch.

The first replica of every stage describes its share as JSON:

    {"is_compressed": true, "has_params": true,
     "params": {"0.weight": ["bfloat16", 64, 32]}, "tied": {}, "shared": [],
     "mask_shapes": {"0.weight": [8, 8]},
     "tensors": {"optimizer": {"0.weight/exp_avg": ["F32", [32], []]}, ...},
     "optimizers": [{"class": ..., "groups": ..., "more": ..., "state": ...}]}

Groups of parameters are known by their settings alone: an optimizer of one process, and those of stages,
may have other groups, or the same ones in another order, and mean the same. Of a tensor whose rows lie on
several ranks the third entry says which has which: [[0, 0, 16], [1, 16, 32]].
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from samo.checkpoint import values
from samo.errors import CheckpointError

__all__ = []

TENSOR_KINDS: Final = ("weights", "optimizer", "masks")

Share = Mapping[str, Any]


class ParamShare(NamedTuple):
    """A parameter, as far as the manifest counts it."""

    dtype: str
    numel: int
    kept: int


class Origin(NamedTuple):
    """A tensor, and the rank that gives it, or those that give rows of it."""

    rank: int
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[Sequence[int]] = ()
    """Rank, first row and the one behind the last, in the order of rows."""


class Whole(NamedTuple):
    """What one process would have."""

    model: dict[str, Any]
    optimizers: list[dict[str, Any]]
    mask_shapes: dict[str, list[int]]
    tensors: dict[str, dict[str, Origin]]


def merge(shares: Mapping[int, Share], order: Sequence[str] = ()) -> Whole:
    """Return the whole of what stages hold.

    Args:
        shares: The share of each stage by the rank that gives it, in the order of stages.
        order: Names of the whole model's tensors in their order; otherwise stage follows stage.

    Raises:
        CheckpointError: Shares do not belong together.
    """
    names = order or [name for share in shares.values() for name in share["tensors"]["weights"]]
    places = {name: place for place, name in enumerate(names)}

    def ordered(names: Iterable[str]) -> list[str]:
        return sorted(dict.fromkeys(names), key=lambda name: places.get(name, len(places)))

    optimizers = _optimizers(shares, ordered)
    tensors = {kind: _origins(shares, kind, ordered) for kind in TENSOR_KINDS}
    used = [name for entry in optimizers for name in references_of(entry)]
    tensors["optimizer"] = {name: tensors["optimizer"][name] for name in used}
    mask_shapes = {
        name: shape for share in shares.values() for name, shape in share["mask_shapes"].items()
    }
    return Whole(
        _model(list(shares.values()), ordered),
        optimizers,
        {name: mask_shapes[name] for name in ordered(mask_shapes)},
        tensors,
    )


Order = Callable[[Iterable[str]], list[str]]


def _model(shares: list[Share], ordered: Order) -> dict[str, Any]:
    params = {n: ParamShare(*param) for share in shares for n, param in share["params"].items()}
    tied = {alias: name for share in shares for alias, name in share["tied"].items()}
    count: Counter[str] = Counter()
    for name in ordered(params):
        count[params[name].dtype] += params[name].numel
    return {
        "is_compressed": any(share["is_compressed"] for share in shares),
        "dtype": max(count, key=lambda dtype: count[dtype], default="float32"),
        "num_params": count.total(),
        "kept": sum(param.kept for param in params.values()),
        "tied": {alias: tied[alias] for alias in ordered(tied)},
    }


def _origins(shares: Mapping[int, Share], kind: str, ordered: Order) -> dict[str, Origin]:
    """Return who gives each tensor: the first stage that has it."""
    # Tied weights and their state, and settings that are tensors, which have their bytes as names.
    tied = {name for share in shares.values() for name in share["shared"]}
    common = set(tied)
    for share in shares.values():
        for entry in share["optimizers"]:
            state = {name: content for name, content in entry["state"].items() if name in tied}
            common.update(references_of({**entry, "state": state}))
    found: dict[str, Origin] = {}
    for rank, share in shares.items():
        for name, (dtype, shape, pieces) in share["tensors"][kind].items():
            first = found.setdefault(name, Origin(rank, dtype, tuple(shape), pieces))
            if first.rank != rank and name not in common:
                raise CheckpointError(
                    f"ranks {first.rank} and {rank}, of different stages, both hold '{name}', and it is "
                    "no tied weight; give samo.save the samo.Pipeline, or a mesh whose axis 'pipe' is "
                    "that of the stages"
                )
    return {name: found[name] for name in ordered(found)}


def _optimizers(shares: Mapping[int, Share], ordered: Order) -> list[dict[str, Any]]:
    given = {rank: share["optimizers"] for rank, share in shares.items()}
    having = [rank for rank in given if given[rank]]
    if not having:
        return []
    first = having[0]
    for rank, share in shares.items():
        if len(given[rank]) != len(given[first]) and (given[rank] or share["has_params"]):
            raise CheckpointError(
                f"samo.save was given {len(given[first])} optimizers on rank {first} and "
                f"{len(given[rank])} on rank {rank}; give the same ones on all ranks, and where a stage "
                "has none of one's parameters build that on an empty group, [{'params': []}]"
            )
    return [
        _optimizer({rank: given[rank][i] for rank in having}, ordered)
        for i in range(len(given[first]))
    ]


def _optimizer(entries: Mapping[int, dict[str, Any]], ordered: Order) -> dict[str, Any]:
    """Return one optimizer of all stages."""
    first_rank, first = next(iter(entries.items()))
    names: dict[str, list[str]] = {}
    settings: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for rank, entry in entries.items():
        if entry["class"] != first["class"]:
            raise CheckpointError(
                f"rank {first_rank} has a {first['class']} and rank {rank} a {entry['class']}; build the "
                "same optimizer on all ranks"
            )
        for group in entry["groups"]:
            key = settings_key(group["settings"])
            settings[key] = group["settings"]
            names.setdefault(key, []).extend(group["names"])
        state = {**entry["state"], **state}  # a tied weight's is that of the first
    groups = [{"names": ordered(found), "settings": settings[key]} for key, found in names.items()]
    groups = [group for group in groups if group["names"]]
    place = {name: i for i, name in enumerate(ordered(n for g in groups for n in g["names"]))}
    groups.sort(key=lambda group: place[group["names"][0]])
    return {
        "class": first["class"],
        "groups": groups,
        "more": first["more"],
        "state": {name: state[name] for name in place if name in state},
    }


def settings_key(settings: Mapping[str, Any]) -> str:
    """Return the same text for the same settings."""
    return json.dumps(settings, sort_keys=True)


def references_of(entry: Mapping[str, Any]) -> list[str]:
    """Return the names of all tensors that an optimizer's entry refers to, each once."""
    settings = [group["settings"] for group in entry["groups"]]
    found = values.references([*settings, entry["more"], *entry["state"].values()])
    return list(dict.fromkeys(found))
