"""Pipelines whose stages have replicas: equal to one process on the whole batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samo
from tests.pipeline.cases import compress, next_token_loss, optimizer, tiny_gpt, tokens
from tests.ranks import run_ranks

TIMEOUT = 20
Case = tuple[int, bool, bool, bool]
"""Stages per rank, whether compressed, tied, and whether two batches are reduced at once."""
CASES: list[Case] = [
    (1, False, True, False),
    (1, True, True, True),
    (1, True, False, True),
    (2, True, False, False),
]


def two_layers(is_tied: bool) -> nn.Module:
    return tiny_gpt(num_layers=2, is_tied=is_tied).double()


def prepared(module: nn.Module, case: Case) -> torch.optim.Optimizer:
    if case[1]:
        compress(module, two_layers(case[2]))
    return optimizer("sgd" if case[2] else "adamw", module, is_compressed=case[1])


def grid(rank: int, num_ranks: int) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """Return the losses of this rank's replica and the weights of its stage, for each case."""
    mesh = samo.mesh(pipe=2)
    replica = mesh["data"].get_local_rank()
    found = []
    for case in CASES:
        per_rank, _, is_tied, is_reduced_once = case
        whole = two_layers(is_tied)
        if replica == 1:  # replicas start with the values of the first one
            for param in whole.parameters():
                nn.init.normal_(param)
        pipeline = samo.Pipeline(
            whole, next_token_loss, mesh, 2, stages_per_rank=per_rank, timeout_s=TIMEOUT
        )
        opt = prepared(pipeline.module, case)
        losses = []
        for seed in range(4):
            x, y = (part.chunk(2)[replica] for part in tokens(8, seed))
            is_last = seed % 2 == 1 or not is_reduced_once
            losses.append(pipeline.step(x, target=y, is_last=is_last))
            if seed % 2:  # gradients of two batches add up
                opt.step()
                opt.zero_grad()
        state = {name: value.clone() for name, value in pipeline.module.state_dict().items()}
        found.append((losses, state))
        pipeline.close()
    return found


def one_process(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    model = two_layers(case[2])
    opt = prepared(model, case)
    losses = []
    for seed in range(4):
        x, y = tokens(8, seed)
        losses.append(next_token_loss(model(x), y))
        losses[-1].backward()
        if seed % 2:
            opt.step()
            opt.zero_grad()
    return torch.stack(losses).detach(), dict(model.state_dict())


def test_replicated_stages_train_as_one_process_on_whole_batches() -> None:
    results = run_ranks(4, grid, timeout_s=100)
    for number, case in enumerate(CASES):
        losses, state = one_process(case)
        found = [result[number] for result in results]
        # Every replica has its loss on all stages.
        ours = torch.stack([torch.stack(mine) for mine, _ in found]).mean(0)
        torch.testing.assert_close(ours, losses, rtol=1e-10, atol=0, msg=str(case))
        for _, weights in found:
            for name, value in weights.items():
                if value.is_floating_point():
                    off = (value - state[name]).abs().max() / state[name].abs().max()
                    assert off <= 1e-10, f"{case}: {name} is off by {off:.2e}"
                else:  # bitmaps
                    assert torch.equal(value, state[name]), f"{case}: {name}"
        assert {name for _, weights in found for name in weights} >= state.keys()
        for first, second in ((0, 1), (2, 3)):  # replicas of one stage
            for name, value in found[first][1].items():
                assert torch.equal(value, found[second][1][name]), f"{case}: {name}"
        if case[2]:
            assert torch.equal(found[0][1]["embed.weight"], found[2][1]["head.weight"])


class Sometimes(nn.Module):
    """Uses ``odd`` if the input is odd, ``never`` never; the gradient of ``rows`` is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4, sparse=True)
        self.even, self.odd, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.rows(x)
        return self.odd(h) if int(x[0]) % 2 else self.even(h)


def inputs(rank: int, is_odd: bool) -> Tensor:
    return torch.tensor([rank if is_odd else 2 * rank, 3])


def uneven(mesh: Any, rank: int) -> list[dict[str, Tensor | None]]:
    found = []
    for is_odd in (True, False):
        torch.manual_seed(0)
        with samo.Pipeline([Sometimes()], F.mse_loss, mesh, 1, timeout_s=TIMEOUT) as pipeline:
            pipeline.step(inputs(rank, is_odd), target=torch.zeros(2, 4))
        params = dict(pipeline.module.named_parameters())
        found.append({name.removeprefix("0."): param.grad for name, param in params.items()})
    return found


def other_masks(mesh: Any, rank: int) -> list[str]:
    x, said = torch.ones(2, 8), []
    for is_late in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
        pipeline = samo.Pipeline(model, F.mse_loss, mesh, 1, timeout_s=TIMEOUT)
        masks = [samo.prune(model, 0.5, method="random", seed=seed) for seed in range(3)]
        samo.compress_(pipeline.module, masks[0] if is_late else masks[rank])
        opt: Any = torch.optim.SGD(pipeline.module.parameters(), lr=0.1)
        if is_late:
            samo.remap_(pipeline.module, masks[1], opt)
            pipeline.step(x, target=x)  # the same on both
            samo.remap_(pipeline.module, masks[1 + rank], opt)
        with pytest.raises(samo.MaskError) as caught:
            pipeline.step(x, target=x)
        said.append(str(caught.value))
        pipeline.close()
    return said


def work(rank: int, num_ranks: int) -> Any:
    mesh = samo.mesh(data=2)
    return uneven(mesh, rank), other_masks(mesh, rank)


def test_replicas_may_lack_gradients_but_not_have_different_masks() -> None:
    """A gradient that one replica lacks is zero there; one that all lack stays None."""
    results, said = zip(*run_ranks(2, work))
    assert all(
        text.startswith("the mask of '0.weight' is not the same on")
        for texts in said
        for text in texts
    )
    for number, is_odd in enumerate((True, False)):
        torch.manual_seed(0)
        model = Sometimes()
        for rank in range(2):
            output = model(inputs(rank, is_odd))
            (F.mse_loss(output, torch.zeros(2, 4)) / 2).backward()
        assert (model.odd.weight.grad is None) == (not is_odd)
        for name, param in model.named_parameters():
            for found in results:
                if param.grad is None:
                    assert found[number][name] is None, name
                else:
                    torch.testing.assert_close(found[number][name], param.grad.to_dense(), msg=name)
