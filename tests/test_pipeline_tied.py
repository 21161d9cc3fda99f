"""Weights that two stages use: equal masks, gradients added once, failures with a name."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samo
from samo.pipeline.layers import take_apart
from samo.pipeline.memory import MemoryNetwork
from samo.pipeline.tied import Tie, ties_of


def on_two_stages(modules: list[nn.Module], do: Any) -> list[Any]:
    """Call ``do(module, transport)`` for each stage in a thread; return results or errors."""
    network = MemoryNetwork(2)
    results: list[Any] = [None, None]

    def work(stage: int) -> None:
        try:
            results[stage] = do(modules[stage], network.transport(stage))
        except samo.SamoError as error:
            results[stage] = error

    threads = [threading.Thread(target=work, args=(stage,)) for stage in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False))


def compressed(seed: int) -> nn.Module:
    model = plain()
    return samo.compress_(model, samo.prune(model, 0.5, method="random", seed=seed))


TIE = Tie(("0.weight",), (0, 1))


def test_ties_are_found_where_a_weight_lies_on_two_ranks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    layers = take_apart(model)
    assert ties_of(layers, [(0, 2), (2, 3)], 2) == [Tie(("0.weight", "2.weight"), (0, 1))]
    assert ties_of(layers, [(0, 3)], 1) == []


def test_gradients_are_added_once_to_what_was_there_before() -> None:
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))]

    def do(module: Any, transport: Any) -> None:
        TIE.copy_weight(module, transport)
        module[0].weight.grad = torch.full((2, 2), 10.0)
        aside = TIE.set_aside(module)
        if transport.stage == 1:  # the other one had no gradient at all
            module[0].weight.grad = torch.full((2, 2), 3.0)
        TIE.add_up(module, transport, aside)

    on_two_stages(modules, do)
    assert torch.equal(modules[0][0].weight, modules[1][0].weight)
    for module in modules:
        assert torch.equal(module[0].weight.grad, torch.full((2, 2), 13.0))


def test_different_masks_on_two_stages_are_refused_by_both() -> None:
    def check(module: nn.Module, transport: Any) -> None:
        TIE.check(module, transport)

    assert on_two_stages([compressed(1), compressed(1)], check) == [None, None]
    for error in on_two_stages([compressed(1), compressed(2)], check):
        assert isinstance(error, samo.MaskError)
        with pytest.raises(samo.MaskError, match=r"tied weight '0.weight' has different masks on"):
            raise error


def test_masks_that_change_later_are_compared_again() -> None:
    modules = [compressed(1), compressed(1)]

    def steps(module: Any, transport: Any) -> None:
        for seeds in ((1, 1), (2, 2), (2, 3)):
            samo.remap_(
                module, samo.prune(plain(), 0.5, method="random", seed=seeds[transport.stage])
            )
            TIE.check(module, transport)

    for error in on_two_stages(modules, steps):
        assert isinstance(error, samo.MaskError)


def test_a_gradient_that_was_not_reduced_is_not_added_up() -> None:
    mesh = samo.mesh()
    try:
        model = compressed(1)
        samo.replicate(model, mesh["data"])
        with samo.no_sync(model):
            model(torch.ones(1, 8)).sum().backward()
        tie = Tie(("0.weight",), (0,))
        with pytest.raises(samo.CompressionError, match="is not reduced over ranks yet"):
            tie.add_up(model, MemoryNetwork(1).transport(0), None)
    finally:
        torch.distributed.destroy_process_group()


def test_a_stage_that_does_not_add_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = samo.Pipeline(nn.Sequential(nn.Linear(2, 2)), F.mse_loss, None, 1)

    def broken(tensors: object, stages: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(pipeline._transport, "add_up", broken)
    monkeypatch.setattr(pipeline._transport, "ranks", [4, 7])
    monkeypatch.setattr(pipeline, "_ties", [TIE])
    with pytest.raises(
        samo.PeerError, match=r"another stage did not come \(Connection closed by peer"
    ) as e:
        pipeline.step(torch.ones(1, 2), target=torch.ones(1, 2))
    assert e.value.ranks == ()
    pipeline._runner._failure = None

    def silent(tensors: object, stages: object) -> None:
        raise samo.PeerError("rank 9 did not come", ranks=(9,))

    monkeypatch.setattr(pipeline._transport, "add_up", silent)
    with pytest.raises(samo.PeerError, match="rank 9 did not come"):  # who is named stays
        pipeline.step(torch.ones(1, 2), target=torch.ones(1, 2))
