"""What ranks hold becomes what one process would have, or is refused: decided without a single rank."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from samo.checkpoints.merging import Piece, merge
from samo.errors import CheckpointError

ORDER = ["a.weight", "b.weight", "c.weight", "d.weight"]


def optimizer(names: list[str], lr: float = 0.1) -> dict[str, Any]:
    return {
        "class": "samo.AdamW",
        "groups": [{"names": names, "settings": {"lr": lr, "rate": {"$tensor": "group 0/rate"}}}],
        "state": {name: {"exp_avg": {"$tensor": f"{name}/exp_avg"}} for name in names},
        "skipped_steps": 0,
        "digests": {"group 0/rate": "00"},
    }


def share(
    stage: int, names: list[str], owned: tuple[int, int] = (0, 6), *, is_first: bool = True
) -> dict[str, Any]:
    """Return the share of a rank with weights of 8 entries, 6 of them kept, and moments for some."""
    whole = {name: ["F32", [6], 0, 6] for name in names} if is_first else {}
    rate = {"group 0/rate": ["F32", [], 0, 1]} if is_first else {}
    return {
        "stage": stage,
        "is_first": is_first,
        "is_compressed": True,
        "has_params": True,
        "params": {name: ["float32", 8, 6] for name in names} if is_first else {},
        "tied": {},
        "shared": [],
        "mask_shapes": {name: [2, 4] for name in names} if is_first else {},
        "tensors": {
            "weights": whole,
            "rest": {},
            "optimizer": {**rate, **{f"{name}/exp_avg": ["F32", [6], *owned] for name in names}},
            "masks": {name: ["I32", [2], 0, 2] for name in whole},
        },
        "optimizer": optimizer(names),
    }


def grid(cut: int = 3) -> dict[int, dict[str, Any]]:
    """Two stages, whose layers alternate, of two replicas each."""
    odd, even = ["b.weight", "d.weight"], ["a.weight", "c.weight"]
    return {
        0: share(0, even, (0, cut)),
        1: share(0, even, (cut, 6), is_first=False),
        2: share(1, odd, (0, cut)),
        3: share(1, odd, (cut, 6), is_first=False),
    }


@given(st.integers(0, 6))
def test_a_grid_is_what_one_process_has(cut: int) -> None:
    alone, together = merge({0: share(0, ORDER)}), merge(grid(cut), ORDER)
    assert together.model == alone.model
    assert together.optimizer == alone.optimizer
    assert list(together.mask_shapes) == list(alone.mask_shapes) == ORDER
    for kind, recipes in alone.tensors.items():
        found = together.tensors[kind]
        assert list(found) == list(recipes)
        assert [r[:2] for r in found.values()] == [r[:2] for r in recipes.values()]
    pieces = together.tensors["optimizer"]["d.weight/exp_avg"].pieces
    assert pieces == tuple(p for p in (Piece(2, 0, cut), Piece(3, cut, 6)) if p.stop > p.start)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.randoms())
def test_pieces_make_up_a_tensor_whatever_ranks_hold(cuts: list[int], random: Any) -> None:
    bounds = [0, *sorted(cuts), 20]
    pieces = list(pairwise(bounds))
    random.shuffle(pieces)
    shares = {}
    for rank, owned in enumerate(pieces):
        shares[rank] = share(0, ["a.weight"], is_first=rank == 0)
        shares[rank]["tensors"]["optimizer"]["a.weight/exp_avg"] = ["F32", [20], *owned]
    found = merge(shares).tensors["optimizer"]["a.weight/exp_avg"].pieces
    assert [entry for _, *owned in found for entry in range(*owned)] == list(range(20))


def test_without_an_order_stage_follows_stage() -> None:
    names = ["a.weight", "c.weight", "b.weight", "d.weight"]
    assert list(merge(grid()).tensors["weights"]) == names


def test_a_tied_weight_comes_from_the_first_stage_that_has_it() -> None:
    shares = grid()
    for rank, owned in ((2, (0, 1)), (3, (1, 6))):
        more = share(1, ["a.weight"], owned, is_first=rank == 2)
        for kind, tensors in more["tensors"].items():
            shares[rank]["tensors"][kind] |= tensors
        shares[rank]["optimizer"] = optimizer(["b.weight", "d.weight", "a.weight"])
        shares[rank]["params"] |= more["params"]
        shares[rank]["tied"] = {"head.weight": "a.weight"}
        shares[rank]["shared"] = ["a.weight"]
    found = merge(shares, ORDER)
    assert found.model["tied"] == {"head.weight": "a.weight"}
    assert found.model["num_params"] == 32
    assert found.optimizer == merge({0: share(0, ORDER)}).optimizer
    pieces = found.tensors["optimizer"]["a.weight/exp_avg"].pieces
    assert pieces == (Piece(0, 0, 3), Piece(1, 3, 6))


def test_a_stage_without_parameters_needs_no_optimizer() -> None:
    shares = {0: share(0, ORDER), 1: share(1, [])}
    shares[1] |= {"has_params": False, "optimizer": None}
    shares[1]["tensors"]["optimizer"] = {}
    assert merge(shares, ORDER).optimizer == merge({0: share(0, ORDER)}).optimizer
    for entry in shares.values():
        entry["optimizer"] = None
    assert merge(shares).optimizer is None


def test_most_skipped_steps_count() -> None:
    shares = grid()
    shares[2]["optimizer"]["skipped_steps"] = 2
    assert merge(shares).optimizer["skipped_steps"] == 2  # type: ignore[index]


def without_optimizer(shares: Any) -> None:
    shares[2]["optimizer"] = None


def other_class(shares: Any) -> None:
    shares[3]["optimizer"]["class"] = "torch.optim.SGD"


def more_groups(shares: Any) -> None:
    shares[2]["optimizer"]["groups"] *= 2


def other_settings(shares: Any) -> None:
    shares[2]["optimizer"] = optimizer(["b.weight", "d.weight"], lr=0.2)


def other_digest(shares: Any) -> None:
    shares[2]["optimizer"]["digests"] = {"group 0/rate": "11"}


def other_state(shares: Any) -> None:
    shares[3]["optimizer"]["state"]["b.weight"] = {"steps": 3}


def same_layers(shares: Any) -> None:
    shares[2] = share(1, ["a.weight"], (0, 3))
    shares[3] = share(1, ["a.weight"], (3, 6), is_first=False)


def other_type(shares: Any) -> None:
    shares[1]["tensors"]["optimizer"]["a.weight/exp_avg"][0] = "I8"


def hole(shares: Any) -> None:
    shares[1]["tensors"]["optimizer"]["a.weight/exp_avg"][2] = 4


def no_last(shares: Any) -> None:
    del shares[3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_optimizer, r"rank 0 gave an optimizer to samo.save and rank 2 none"),
        (other_class, r"rank 0 has a samo.AdamW with 1 groups and rank 3 a torch.optim.SGD with 1"),
        (more_groups, r"a samo.AdamW with 1 groups and rank 2 a samo.AdamW with 2"),
        (other_settings, r"group 0 of the optimizer has lr=0.1 on rank 0 and 0.2 on rank 2"),
        (other_digest, r"that is a tensor \(group 0/rate\) differs between ranks 0 and 2"),
        (other_state, r"state of 'b.weight' on rank 3 is {'steps': 3}, and {'exp_avg'"),
        (same_layers, r"ranks 0 and 2, of different stages, both hold 'a.weight', and it is no"),
        (other_type, r"'a.weight/exp_avg' is \['I8', \(6,\)\] on rank 1 and \['F32'.* on rank 0"),
        (hole, r"of the 6 entries of 'a.weight/exp_avg' ranks hold \[\(0, 0, 3\), \(1, 4, 6\)\]"),
        (no_last, r"of the 6 entries of 'b.weight/exp_avg' ranks hold \[\(2, 0, 3\)\]"),
    ],
)
def test_shares_that_do_not_belong_together_are_refused(
    change: Callable[[Any], None], message: str
) -> None:
    shares = copy.deepcopy(grid())
    change(shares)
    with pytest.raises(CheckpointError, match=message):
        merge(shares, ORDER)
