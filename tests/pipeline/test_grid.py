"""Pipelines beside each other whose stages are replicated: equal to one process on the whole batch."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samo
from samo.pipeline import gradients
from tests.pipeline.cases import compress, next_token_loss, optimizer, tiny_gpt, tokens
from tests.ranks import run_ranks

TIMEOUT = 20


def two_layers(**settings: Any) -> nn.Module:
    return tiny_gpt(num_layers=2, **settings)


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


Case = tuple[bool, bool, bool]
"""Whether compressed, whether tied, whether gradients of two batches are reduced once."""
GRID_CASES: list[Case] = [
    (is_compressed, is_tied, is_reduced_once)
    for is_compressed in (False, True)
    for is_tied in (False, True)
    for is_reduced_once in (False, True)
]


def grid(rank: int, num_ranks: int) -> list[dict[str, Tensor]]:
    setattr(gradients, "_BUCKET_BYTES", 2000)  # noqa: B010, several buckets; it is final
    mesh = samo.mesh(pipe=2)
    place = mesh["data"].get_local_rank()
    found = []
    for is_compressed, is_tied, is_reduced_once in GRID_CASES:
        whole = two_layers(is_tied=is_tied)
        if place == 1:  # replicas start with the values of the first one
            torch.manual_seed(rank)
            for param in whole.parameters():
                nn.init.normal_(param)
        pipeline = samo.Pipeline(whole, next_token_loss, mesh, 2, timeout_s=TIMEOUT)
        if is_compressed:
            compress(pipeline.module, two_layers(is_tied=is_tied))
        opt = torch.optim.SGD(pipeline.module.parameters(), lr=0.1)
        for seed in range(4):
            x, y = (part.chunk(2)[place] for part in tokens(8, seed))
            is_last = seed % 2 == 1 or not is_reduced_once
            pipeline.step(x, target=y, is_last=is_last)
            if seed % 2:  # gradients of two batches add up
                opt.step()
                opt.zero_grad()
        found.append(copied(pipeline.module))
        pipeline.close()
    return found


def one_process(is_compressed: bool, is_tied: bool) -> dict[str, Tensor]:
    model = two_layers(is_tied=is_tied)
    if is_compressed:
        compress(model, two_layers(is_tied=is_tied))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(4):
        x, y = tokens(8, seed)
        next_token_loss(model(x), y).backward()
        if seed % 2:
            opt.step()
            opt.zero_grad()
    return dict(model.state_dict())


def test_replicated_stages_train_as_one_process_with_and_without_tied_weights() -> None:
    everyones = run_ranks(4, grid, timeout_s=100)
    for number, (is_compressed, is_tied, is_reduced_once) in enumerate(GRID_CASES):
        wanted = one_process(is_compressed, is_tied)
        case = f"compressed={is_compressed} tied={is_tied} once={is_reduced_once}"
        for rank, found in enumerate(everyones):
            for name, value in found[number].items():
                # Sums of other pieces in another order, over four batches.
                is_close = torch.allclose(value, wanted[name], rtol=1e-4, atol=1e-6)
                assert is_close, f"{case}, rank {rank}, {name}"
        for first, second in ((0, 1), (2, 3)):  # replicas of one stage
            for name, value in everyones[first][number].items():
                assert torch.equal(value, everyones[second][number][name]), f"{case}, {name}"
        if is_tied:
            first = everyones[0][number]["embed.weight"]
            assert all(torch.equal(found[number]["head.weight"], first) for found in everyones[2:])


# Every schedule beside replicas, in float64

CASES: list[tuple[str, str]] = [
    (schedule, name)
    for schedule in ("message-driven", "1f1b", "gpipe", "interleaved")
    for name in ("sgd", "adamw")
]
STEPS = 4


def every_schedule(rank: int, num_ranks: int, pipe: int) -> list[tuple[list[Tensor], Any]]:
    """Return the losses of this rank's replica and the weights of its stage, for each case."""
    mesh = samo.mesh(pipe=pipe)
    place, num_replicas = mesh["data"].get_local_rank(), num_ranks // pipe
    found = []
    for schedule, name in CASES:
        pipeline = samo.Pipeline(
            two_layers().double(),
            next_token_loss,
            mesh,
            2,
            schedule=schedule,
            timeout_s=TIMEOUT,
        )
        compress(pipeline.module, two_layers())
        opt = optimizer(name, pipeline.module, is_compressed=True)
        losses = []
        for seed in range(STEPS):
            x, y = (part.chunk(num_replicas)[place] for part in tokens(8, seed))
            losses.append(pipeline.step(x, target=y))
            opt.step()
            opt.zero_grad()
        found.append((losses, copied(pipeline.module)))
        pipeline.close()
    return found


@functools.cache
def whole_batches(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    model = two_layers().double()
    compress(model, two_layers())
    opt = optimizer(name, model, is_compressed=True)
    losses = []
    for seed in range(STEPS):
        x, y = tokens(8, seed)
        loss = next_token_loss(model(x), y)
        loss.backward()
        losses.append(loss.detach())
        opt.step()
        opt.zero_grad()
    return torch.stack(losses), dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("pipe", [2, 1])
def test_every_schedule_trains_replicas_as_one_process_on_whole_batches(pipe: int) -> None:
    everyones = run_ranks(4, every_schedule, pipe)
    for number, (schedule, name) in enumerate(CASES):
        case = f"{pipe}x{4 // pipe} {schedule} {name}"
        losses, state = whole_batches(name)
        assert losses.dtype == torch.float64
        # Replicas of one stage follow each other: every replica has its loss on all stages.
        ours = torch.stack([torch.stack(found[number][0]) for found in everyones]).mean(0)
        torch.testing.assert_close(ours, losses, rtol=1e-10, atol=0, msg=case)
        for found in everyones:
            for key, value in found[number][1].items():
                if not value.is_floating_point():  # bitmaps
                    assert torch.equal(value, state[key]), f"{case}: {key}"
                    continue
                off = (value - state[key]).abs().max() / state[key].abs().max()
                assert off <= 1e-10, f"{case}: {key} is off by {off:.2e}"
        assert {key for found in everyones for key in found[number][1]} == state.keys()


# What one replica has and another has not


class Sometimes(nn.Module):
    """Uses ``odd`` where the input says so, ``never`` never, and has a sparse gradient for ``rows``."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4, sparse=True)
        self.even, self.odd, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.rows(x)
        return self.odd(h) if int(x[0]) % 2 else self.even(h)


def uneven(rank: int, num_ranks: int, is_odd: bool) -> dict[str, Tensor | None]:
    mesh = samo.mesh(data=2)
    torch.manual_seed(0)
    pipeline = samo.Pipeline([Sometimes()], F.mse_loss, mesh, 1, timeout_s=TIMEOUT)
    x = torch.tensor([rank if is_odd else 2 * rank, 3])
    pipeline.step(x, target=torch.zeros(2, 4))
    pipeline.close()
    grads = {name: param.grad for name, param in pipeline.module.named_parameters()}
    return {name.removeprefix("0."): grad for name, grad in grads.items()}


@pytest.mark.parametrize("is_odd", [True, False])
def test_a_gradient_that_one_replica_lacks_is_zero_there_and_one_that_all_lack_stays_away(
    is_odd: bool,
) -> None:
    first, second = run_ranks(2, uneven, is_odd)
    torch.manual_seed(0)
    model = Sometimes()
    for rank in range(2):
        x = torch.tensor([rank if is_odd else 2 * rank, 3])
        (F.mse_loss(model(x), torch.zeros(2, 4)) / 2).backward()
    for name, param in model.named_parameters():
        for found in (first, second):
            if param.grad is None:
                assert found[name] is None, name
                continue
            torch.testing.assert_close(found[name], param.grad.to_dense(), msg=name)
    assert (first["odd.weight"] is None) == (not is_odd)


def other_masks(rank: int, num_ranks: int, is_late: bool) -> str:
    mesh = samo.mesh(data=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    pipeline = samo.Pipeline(model, F.mse_loss, mesh, 1, timeout_s=TIMEOUT)
    masks = [samo.prune(model, 0.5, method="random", seed=seed) for seed in range(3)]
    samo.compress_(pipeline.module, masks[0] if is_late else masks[rank])
    opt = torch.optim.SGD(pipeline.module.parameters(), lr=0.1)
    x = torch.ones(2, 8)
    if is_late:
        pipeline.step(x, target=x)
        opt.step()
        samo.remap_(pipeline.module, masks[1], opt)
        pipeline.step(x, target=x)  # the same on both
        samo.remap_(pipeline.module, masks[1 + rank], opt)
    with pytest.raises(samo.MaskError) as found:
        pipeline.step(x, target=x)
    pipeline.close()
    return str(found.value)


@pytest.mark.parametrize("is_late", [False, True])
def test_replicas_with_different_masks_are_refused_by_all(is_late: bool) -> None:
    for said in run_ranks(2, other_masks, is_late):
        assert said.startswith("the mask of '0.weight' is not the same on rank")
