"""What stages hold becomes what one process would have, or is refused: decided without a single rank."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from samo.checkpoint.merging import Origin, merge
from samo.errors import CheckpointError

ORDER = ["a.weight", "b.weight", "c.weight", "d.weight"]


def group(names: list[str], decay: float) -> dict[str, Any]:
    return {"names": names, "settings": {"decay": decay, "lr": {"$tensor": "setting 00"}}}


def optimizer(names: list[str], *, is_reversed: bool = False) -> dict[str, Any]:
    """Return an optimizer in whose state "a" and "b" decay; groups without names are left out."""
    groups = [
        group([n for n in names if n < "c"], 0.1),
        group([n for n in names if n >= "c"], 0.0),
    ]
    return {
        "class": "samo.AdamW",
        "groups": groups[::-1] if is_reversed else groups,
        "more": {},
        "state": {name: {"exp_avg": {"$tensor": f"{name}/exp_avg"}} for name in names},
    }


def share(names: list[str], *, is_reversed: bool = False) -> dict[str, Any]:
    """Return the share of a stage with weights of 8 entries, 6 of them kept."""
    whole = {name: ["F32", [6], ()] for name in names}
    moments = {f"{name}/exp_avg": ["F32", [6], ()] for name in names}
    return {
        "is_compressed": True,
        "has_params": True,
        "params": {name: ["float32", 8, 6] for name in names},
        "tied": {},
        "shared": [],
        "mask_shapes": {name: [2, 4] for name in names},
        "tensors": {
            "weights": whole,
            "optimizer": {"setting 00": ["F32", [], ()], **moments},
            "masks": {name: ["I32", [2], ()] for name in whole},
        },
        "optimizers": [optimizer(names, is_reversed=is_reversed)],
    }


def stages() -> dict[int, dict[str, Any]]:
    """Two stages, whose layers alternate, on the first of two replicas each."""
    return {0: share(["a.weight", "c.weight"]), 2: share(["b.weight", "d.weight"])}


@given(st.lists(st.booleans(), min_size=4, max_size=4), st.booleans())
def test_stages_are_what_one_process_has(cuts: list[bool], is_reversed: bool) -> None:
    parts = [
        [n for n, is_first in zip(ORDER, cuts) if is_first is which] for which in (True, False)
    ]
    alone = merge({0: share(ORDER)})
    shares = {rank: share(part, is_reversed=is_reversed) for rank, part in enumerate(parts) if part}
    together = merge(shares, ORDER)
    assert together.model == alone.model
    assert together.optimizers == alone.optimizers
    assert list(together.mask_shapes) == list(alone.mask_shapes) == ORDER
    for kind, origins in alone.tensors.items():
        found = together.tensors[kind]
        assert list(found) == list(origins)
        assert [origin[1:] for origin in found.values()] == [o[1:] for o in origins.values()]


def test_a_tensor_comes_from_the_stage_that_has_it() -> None:
    found = merge(stages(), ORDER).tensors
    assert found["optimizer"]["c.weight/exp_avg"] == Origin(0, "F32", (6,))
    assert found["weights"]["d.weight"] == Origin(2, "F32", (6,))


def test_groups_are_known_by_their_settings() -> None:
    (found,) = merge(stages(), ORDER).optimizers
    assert found["groups"] == [
        group(["a.weight", "b.weight"], 0.1),
        group(["c.weight", "d.weight"], 0.0),
    ]


def test_without_an_order_stage_follows_stage() -> None:
    names = ["a.weight", "c.weight", "b.weight", "d.weight"]
    assert list(merge(stages()).tensors["weights"]) == names


def test_a_tied_weight_comes_from_the_first_stage_that_has_it() -> None:
    shares = stages()
    more = share(["a.weight", "b.weight", "d.weight"])
    shares[2] = {**more, "tied": {"head.weight": "a.weight"}, "shared": ["a.weight"]}
    found = merge(shares, ORDER)
    assert found.model["tied"] == {"head.weight": "a.weight"}
    assert found.model["num_params"] == 32
    assert found.optimizers == merge({0: share(ORDER)}).optimizers
    assert found.tensors["optimizer"]["a.weight/exp_avg"].rank == 0


def test_a_stage_without_parameters_needs_no_optimizer() -> None:
    shares = {0: share(ORDER), 1: share([])}
    shares[1] |= {"has_params": False, "optimizers": []}
    shares[1]["tensors"]["optimizer"] = {}
    assert merge(shares, ORDER).optimizers == merge({0: share(ORDER)}).optimizers
    for entry in shares.values():
        entry["optimizers"] = []
    shares[0]["tensors"]["optimizer"] = {}
    assert merge(shares).optimizers == []


def without_optimizer(shares: Any) -> None:
    shares[2]["optimizers"] = []


def one_more(shares: Any) -> None:
    shares[2]["optimizers"] *= 2


def other_class(shares: Any) -> None:
    shares[2]["optimizers"][0]["class"] = "torch.optim.SGD"


def same_layers(shares: Any) -> None:
    shares[2] = share(["a.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without_optimizer,
            r"samo.save was given 1 optimizers on rank 0 and 0 on rank 2; give the",
        ),
        (one_more, r"samo.save was given 1 optimizers on rank 0 and 2 on rank 2"),
        (other_class, r"rank 0 has a samo.AdamW and rank 2 a torch.optim.SGD; build the same"),
        (same_layers, r"ranks 0 and 2, of different stages, both hold 'a.weight', and it is no"),
    ],
)
def test_shares_that_do_not_belong_together_are_refused(
    change: Callable[[Any], None], message: str
) -> None:
    shares = copy.deepcopy(stages())
    change(shares)
    with pytest.raises(CheckpointError, match=message):
        merge(shares, ORDER)
