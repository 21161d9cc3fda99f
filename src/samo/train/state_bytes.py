"""The bytes of model state: of this rank, and of all pipeline stages together."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from samo.train.events import Accounted
from samo.train.learner import Learner

__all__ = []


def accounted(step: int, learner: Learner) -> Accounted:
    """Return the bytes of state of a replica with all its stages; a collective of all ranks."""
    ranks = learner.ranks
    all_ranks = ranks.all_gather("the size of the model state", state_bytes(learner))
    return Accounted(
        step=step,
        **added_up(all_ranks[:: ranks.num_replicas]),
        weights=learner.weights if learner.phase == "samo" else None,
        rank_bytes=[rank["measured_bytes"] for rank in all_ranks],
    )


def state_bytes(learner: Learner) -> dict[str, Any]:
    """Return the bytes of this rank's model state, as fields of `samo.train.events.Accounted`."""
    held = learner.ledger()
    if held is not None:
        shares = (held.pruned, held.unpruned)
        totals = ("num_params", "measured_bytes", "predicted_bytes", "dense_bytes", "paper_bytes")
        return {
            **{name: getattr(held, name) for name in totals},
            "measured": added_up([share.measured for share in shares]),
            "predicted": added_up([share.predicted for share in shares]),
        }
    params = list(learner.model.parameters())
    count = sum(param.numel() for param in params)
    states = [value for state in learner.opt.state.values() for value in state.values()]
    measured = {
        "dense": sum(param.nbytes for param in params),
        "gradients": sum(param.grad.nbytes for param in params if param.grad is not None),
        "moments": sum(v.nbytes for v in states if isinstance(v, Tensor) and v.dim() > 0),
    }
    predicted = {"dense": 4 * count, "gradients": 4 * count, "moments": 8 * count}
    return {
        "num_params": count,
        "measured_bytes": sum(measured.values()),
        "predicted_bytes": sum(predicted.values()),
        "dense_bytes": 16 * count,  # fp32 in any dtype
        "paper_bytes": None,
        "measured": measured,
        "predicted": predicted,
    }


def added_up(parts: Sequence[Mapping[Any, Any]]) -> dict[str, Any]:
    """Add up the numbers of mappings by name, also of nested ones; None if one is unknown."""
    total: dict[str, Any] = {}
    for name in {name: None for part in parts for name in part}:
        values = [part[name] for part in parts if name in part]
        if isinstance(values[0], Mapping):
            total[name] = added_up(values)
        else:
            total[name] = None if None in values else sum(values)
    return total
