"""What each rank holds of a model becomes what one process would have: who gives which piece. No torch.

Every rank describes its share as JSON. A tensor that a rank holds whole comes from the first replica of
the first stage that has it; one that is sharded is put together from the pieces of all replicas.

    {"stage": 0, "is_first": true, "is_compressed": true, "has_params": true,
     "params": {"0.weight": ["float32", 64, 32]}, "tied": {}, "shared": [],
     "mask_shapes": {"0.weight": [8, 8]},
     "tensors": {"optimizer": {"0.weight/exp_avg": ["F32", [32], 16, 32]}, ...},
     "optimizer": {"class": ..., "groups": ..., "state": ..., "digests": ..., "skipped_steps": 0}}
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from samo.checkpoints import values
from samo.errors import CheckpointError

__all__ = []

TENSOR_KINDS: Final = ("weights", "rest", "optimizer", "masks")


class ParamShare(NamedTuple):
    """A parameter, as far as the manifest counts it."""

    dtype: str
    numel: int
    kept: int


class Piece(NamedTuple):
    """Some entries of a flat tensor, and the rank that has them."""

    rank: int
    start: int
    stop: int


class Recipe(NamedTuple):
    """A tensor, and where its pieces are."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Whole(NamedTuple):
    """What one process would have."""

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    mask_shapes: dict[str, list[int]]
    tensors: dict[str, dict[str, Recipe]]


def merge(shares: Mapping[int, Mapping[str, Any]], order: Sequence[str] = ()) -> Whole:
    """Return the whole of what ranks hold.

    Args:
        shares: The share of each rank.
        order: Names of the whole model's tensors in their order; otherwise stage follows stage.

    Raises:
        CheckpointError: Shares do not belong together, or something is missing.
    """
    ranks = sorted(shares, key=lambda rank: (shares[rank]["stage"], not shares[rank]["is_first"]))
    firsts = [rank for rank in ranks if shares[rank]["is_first"]]
    is_cut = len(firsts) > 1
    places = {name: place for place, name in enumerate(order)}

    def ordered(names: Iterable[str]) -> list[str]:
        found = list(dict.fromkeys(names))
        return sorted(found, key=lambda n: places.get(n, len(places))) if is_cut else found

    shared = {name for rank in firsts for name in shares[rank]["shared"]}
    for entry in (shares[rank]["optimizer"] or {"state": {}} for rank in firsts):
        shared.update(values.references([entry["state"].get(name, {}) for name in [*shared]]))
    optimizer = _optimizer(shares, ranks, firsts, ordered)
    recipes = {kind: _recipes(shares, ranks, kind, shared) for kind in TENSOR_KINDS}
    tensors = {
        kind: {name: found[name] for name in ordered(found)} for kind, found in recipes.items()
    }
    if is_cut and optimizer is not None:
        tensors["optimizer"] = _by_use(tensors["optimizer"], optimizer)
    mask_shapes = {n: shape for r in firsts for n, shape in shares[r]["mask_shapes"].items()}
    return Whole(
        _model([shares[rank] for rank in firsts], ordered),
        optimizer,
        {name: mask_shapes[name] for name in ordered(mask_shapes)},
        tensors,
    )


def _model(shares: list[Mapping[str, Any]], ordered: Any) -> dict[str, Any]:
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


def _recipes(
    shares: Mapping[int, Mapping[str, Any]], ranks: list[int], kind: str, shared: set[str]
) -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    giver: dict[str, int] = {}
    # Settings that are tensors are there on all stages, and compared by their digests.
    settings = {n for rank in ranks for n in (shares[rank]["optimizer"] or {}).get("digests", ())}
    for rank in ranks:
        for name, (dtype, shape, start, stop) in shares[rank]["tensors"][kind].items():
            first = giver.setdefault(name, rank)
            whole = (dtype, tuple(shape))
            if shares[first]["stage"] != shares[rank]["stage"]:
                if name not in shared and name not in settings:
                    raise CheckpointError(
                        f"ranks {first} and {rank}, of different stages, both hold '{name}', and it is "
                        "no tied weight; give samo.save the samo.Pipeline, or a mesh whose axis 'pipe' "
                        "is that of the stages"
                    )
                continue
            old = found.setdefault(name, Recipe(*whole, ()))
            if old[:2] != whole:
                raise CheckpointError(
                    f"'{name}' is {list(whole)} on rank {rank} and {list(old[:2])} on rank {first}; "
                    "replicas must be alike"
                )
            found[name] = old._replace(pieces=(*old.pieces, Piece(rank, start, stop)))
    return {name: _covered(name, recipe) for name, recipe in found.items()}


def _covered(name: str, recipe: Recipe) -> Recipe:
    """Return the pieces in order, without empty ones."""
    pieces = sorted(
        (piece for piece in recipe.pieces if piece.stop > piece.start),
        key=lambda piece: piece.start,
    )
    ends = [0, *(piece.stop for piece in pieces)]
    numel = math.prod(recipe.shape)
    if [*(piece.start for piece in pieces), numel] != ends:
        raise CheckpointError(
            f"of the {numel:,} entries of '{name}' ranks hold {[tuple(piece) for piece in pieces]} (rank, "
            "first, last), which do not make it up; give samo.save the mesh of all ranks"
        )
    return recipe._replace(pieces=tuple(pieces))


def _optimizer(
    shares: Mapping[int, Mapping[str, Any]], ranks: list[int], firsts: list[int], ordered: Any
) -> dict[str, Any] | None:
    entries = {rank: shares[rank]["optimizer"] for rank in ranks}
    having = [rank for rank in firsts if entries[rank] is not None]
    for rank in ranks:
        if having and entries[rank] is None and shares[rank]["has_params"]:
            raise CheckpointError(
                f"rank {having[0]} gave an optimizer to samo.save and rank {rank} none; give one on all "
                "ranks, or on none"
            )
    if not having:
        return None
    first = entries[having[0]]
    for rank in ranks:
        if entries[rank] is not None:
            _check_alike(first, entries[rank], having[0], rank)
    state: dict[str, Any] = {}
    for rank in ranks:
        for name, content in (entries[rank] or {"state": {}})["state"].items():
            if rank in firsts:
                state.setdefault(name, content)
            elif state.get(name) != content:
                raise CheckpointError(
                    f"the optimizer state of '{name}' on rank {rank} is {content}, and {state.get(name)} "
                    "on the first replica; replicas must take the same steps"
                )
    groups = [
        {
            "names": ordered(n for rank in having for n in entries[rank]["groups"][i]["names"]),
            "settings": group["settings"],
        }
        for i, group in enumerate(first["groups"])
    ]
    if len(firsts) > 1:  # as one process, whose optimizer goes through its groups
        names = [name for group in groups for name in group["names"]]
        state = {name: state[name] for name in [*names, *state] if name in state}
    return {
        "class": first["class"],
        "groups": groups,
        "state": state,
        "skipped_steps": max(entries[rank]["skipped_steps"] for rank in having),
    }


def _check_alike(first: dict[str, Any], other: dict[str, Any], rank: int, other_rank: int) -> None:
    if first["class"] != other["class"] or len(first["groups"]) != len(other["groups"]):
        raise CheckpointError(
            f"rank {rank} has a {first['class']} with {len(first['groups'])} groups and rank {other_rank} "
            f"a {other['class']} with {len(other['groups'])}; build the same optimizer on all ranks"
        )
    for i, (mine, theirs) in enumerate(zip(first["groups"], other["groups"])):
        settings, others = mine["settings"], theirs["settings"]
        for key in sorted({*settings, *others}):
            if settings.get(key) != others.get(key):
                raise CheckpointError(
                    f"group {i} of the optimizer has {key}={settings.get(key)} on rank {rank} and "
                    f"{others.get(key)} on rank {other_rank}; a group has one setting on all ranks"
                )
    if first["digests"] != other["digests"]:
        raise CheckpointError(
            f"a setting of the optimizer that is a tensor ({', '.join(first['digests'])}) differs between "
            f"ranks {rank} and {other_rank}; a group has one setting on all ranks"
        )


def _by_use(tensors: dict[str, Recipe], optimizer: dict[str, Any]) -> dict[str, Recipe]:
    """Return tensors in the order in which an optimizer's entry refers to them."""
    settings = [group["settings"] for group in optimizer["groups"]]
    used = values.references([*settings, *optimizer["state"].values()])
    return {name: tensors[name] for name in [*used, *tensors] if name in tensors}
