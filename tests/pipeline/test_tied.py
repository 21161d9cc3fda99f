"""Weights that two stages use: equal masks, gradients added once, failures with a name."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import samo
from samo.pipeline.checking import check_ties
from samo.pipeline.layers import take_apart
from samo.pipeline.setup import connected
from samo.pipeline.tied import Tie, ties_of
from tests.ranks import run_ranks

TIE = Tie(("0.weight",), (0, 1))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False))


def compressed(seed: int) -> nn.Module:
    model = plain()
    return samo.compress_(model, samo.prune(model, 0.5, method="random", seed=seed))


def connected_tie() -> Tie:
    assert dist.group.WORLD is not None
    return connected([TIE], dist.group.WORLD, 20)[0]


def test_ties_are_found_where_a_weight_lies_on_two_ranks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    layers = take_apart(model)
    assert ties_of(layers, [(0, 2), (2, 3)], 2) == [Tie(("0.weight", "2.weight"), (0, 1))]
    assert ties_of(layers, [(0, 3)], 1) == []


def add_once(rank: int, num_ranks: int) -> Any:
    tie = connected_tie()
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(2, 2))
    tie.copy_weight(module)
    module[0].weight.grad = torch.full((2, 2), 10.0)
    aside = tie.set_aside(module)
    if rank == 1:  # the other one had no gradient at all
        module[0].weight.grad = torch.full((2, 2), 3.0)
    tie.add_up(module, aside)
    return module[0].weight.detach(), module[0].weight.grad


def test_gradients_are_added_once_to_what_was_there_before() -> None:
    (first, first_grad), (second, second_grad) = run_ranks(2, add_once)
    assert torch.equal(first, second)
    for grad in (first_grad, second_grad):
        assert torch.equal(grad, torch.full((2, 2), 13.0))


def said_of(tie: Tie, module: nn.Module) -> str:
    assert dist.group.WORLD is not None
    try:
        check_ties([tie], module, dist.group.WORLD)
    except samo.MaskError as error:
        return str(error)
    return ""


def compare(rank: int, num_ranks: int) -> list[str]:
    """A third stage has no part in the tied weight, and hears of it too."""
    tie, is_third = connected_tie(), rank == 2
    elsewhere: nn.Module = nn.Sequential(nn.Tanh())
    found = []
    for module in (
        plain(),
        compressed(1),
        compressed(1 + rank),
        plain() if rank else compressed(1),
    ):
        found.append(said_of(tie, elsewhere if is_third else module))
    module = compressed(1)
    for seeds in ((1, 1), (2, 2), (2, 3)):  # masks that change later
        if not is_third:
            samo.remap_(module, samo.prune(plain(), 0.5, method="random", seed=seeds[rank]))
        found.append(said_of(tie, elsewhere if is_third else module))
    return found


def test_different_masks_on_two_stages_are_refused_by_all() -> None:
    for found in run_ranks(3, compare):
        assert list(map(bool, found)) == [False, False, True, True, False, False, True]
        assert {text.partition(";")[0] for text in found if text} == {
            "tied weight '0.weight' has different masks on stages (0, 1)"
        }


def remap_one(rank: int, num_ranks: int) -> str:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pipe",))
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    pipeline = samo.Pipeline(model, F.mse_loss, mesh, 1, timeout_s=10)
    masks = samo.prune(model, 0.5)
    samo.compress_(pipeline.module, pipeline.masks(masks))
    x = torch.ones(1, 8)
    pipeline.step(x, target=x)
    if rank == 0:
        other = samo.prune(plain(), 0.5, method="random", seed=1)
        samo.remap_(pipeline.module, other)
    with pytest.raises(samo.MaskError) as found:
        pipeline.step(x, target=x)
    pipeline.close()
    return str(found.value)


def test_a_tied_weight_that_one_stage_alone_remaps_is_refused_by_both() -> None:
    for said in run_ranks(2, remap_one):
        assert "'0.weight' has different masks on stages (0, 1)" in said


def test_a_stage_that_does_not_add_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = samo.Pipeline(nn.Sequential(nn.Linear(2, 2)), F.mse_loss, None, 1)

    def broken() -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(pipeline, "_share_gradients", broken)
    with pytest.raises(
        samo.PeerError, match=r"another rank did not join a collective \(Connection closed by peer"
    ) as e:
        pipeline.step(torch.ones(1, 2), target=torch.ones(1, 2))
    assert e.value.rank is None
    pipeline._runner._failure = None

    def silent() -> None:
        raise samo.PeerError("rank 9 did not come", rank=9)

    monkeypatch.setattr(pipeline, "_share_gradients", silent)
    with pytest.raises(samo.PeerError, match="rank 9 did not come"):  # who is named stays
        pipeline.step(torch.ones(1, 2), target=torch.ones(1, 2))
