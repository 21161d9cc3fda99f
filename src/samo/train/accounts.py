"""The account of model state over ranks: of all stages together, and of each rank."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from samo.train.events import Accounted, AccountedAgain
from samo.train.learner import Learner

__all__ = []


def accounted(step: int, learner: Learner, *, is_known: bool = False) -> Accounted:
    """Return what a rank holds after a step; the first one tells of all stages of its replica.

    All ranks call it together.

    Args:
        step: The step.
        learner: What holds it.
        is_known: Whether the record of the run has it already.
    """
    ranks, own = learner.ranks, learner.account()
    all_ranks = [json.loads(text) for text in ranks.texts("the account", json.dumps(own))]
    held = added_up(all_ranks[:: ranks.num_replicas]) if ranks.is_first else own
    kind = AccountedAgain if is_known else Accounted
    return kind(
        step=step,
        **held,
        weights=learner.weights,
        rank_bytes=[account["measured_bytes"] for account in all_ranks],
    )


def added_up(accounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the accounts of several stages, name by name; what one of them does not know is None.

    Example:
        >>> from samo.train.accounts import added_up
        >>> added_up([{"a": 1, "b": {"x": 2}, "c": 3}, {"a": 4, "b": {"x": 5, "y": 6}, "c": None}])
        {'a': 5, 'b': {'x': 7, 'y': 6}, 'c': None}
    """
    whole: dict[str, Any] = dict(accounts[0])
    for account in accounts[1:]:
        for name, value in account.items():
            before = whole[name]
            if isinstance(value, Mapping):
                whole[name] = {
                    kind: before.get(kind, 0) + value.get(kind, 0) for kind in {**before, **value}
                }
            else:
                whole[name] = None if before is None or value is None else before + value
    return whole
