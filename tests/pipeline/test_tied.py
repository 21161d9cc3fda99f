"""Weights that several stages use: gradients of earlier steps, and equal masks."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samo
from samo.pipeline.tied import TiedWeight
from tests.ranks import run_ranks

TIMEOUT = 20


@pytest.mark.parametrize("brought", [3.0, 0.0, None])
def test_the_gradient_of_earlier_steps_stays_unless_it_was_cleared(brought: float | None) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    weight = module[0].weight

    def earlier_after(do: Callable[[], object]) -> Tensor | None:
        tie = TiedWeight(("0.weight",), (0, 1))
        weight.grad = torch.full((2, 2), 10.0)
        tie.before_batch(module)
        weight.grad = None if brought is None else torch.full((2, 2), brought)
        tie.after_batch(module)
        do()
        tie.before_batch(module)
        if brought is None:
            assert weight.grad is None or not weight.grad.any(), "it is not counted twice"
        return tie._earlier

    kept = earlier_after(lambda: None)
    assert kept is not None
    assert torch.equal(kept, torch.full((2, 2), 10.0))
    assert earlier_after(module.zero_grad) is None
    assert earlier_after(lambda: module.zero_grad(set_to_none=False)) is None


def different_masks(rank: int, num_ranks: int) -> list[str]:
    """Return the errors of three pipelines; the stage in the middle lacks the tied weight."""
    mesh, x = samo.mesh(pipe=num_ranks), torch.ones(1, 8)
    said = []
    for fault in ("one is dense", "different", "remapped later"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        model[2].weight = model[0].weight
        masks = [samo.prune(model, 0.5, method="random", seed=seed) for seed in range(3)]
        pipeline = samo.Pipeline(model, F.mse_loss, mesh, 1, timeout_s=TIMEOUT)
        if fault != "one is dense" or rank != 0:
            seed = rank if fault == "different" else 0
            samo.compress_(pipeline.module, pipeline.masks(masks[seed]))
        if fault == "remapped later":
            pipeline.step(x, target=x)
            samo.remap_(pipeline.module, pipeline.masks(masks[1]))
            pipeline.step(x, target=x)  # the same on both
            if rank == 0:
                samo.remap_(pipeline.module, pipeline.masks(masks[2]))
        with pytest.raises(samo.MaskError) as caught:
            pipeline.step(x, target=x)
        said.append(str(caught.value).partition(";")[0])
        pipeline.close()
    return said


def test_different_masks_of_a_tied_weight_are_refused_by_all_stages() -> None:
    text = "tied weight '0.weight' has different masks on stages (0, 2)"
    assert run_ranks(3, different_masks) == [[text] * 3] * 3
