"""Pipelines beside each other whose stages are replicated: equal to one process on the whole batch."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samo
from tests.pipeline_cases import compress, next_token_loss, optimizer, tiny_gpt, tokens
from tests.ranks import run_ranks

TIMEOUT = 20


def two_layers(**settings: Any) -> nn.Module:
    return tiny_gpt(num_layers=2, **settings)


def grid(rank: int, num_ranks: int, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    mesh = samo.mesh(pipe=2)
    place = mesh["data"].get_local_rank()
    found = []
    for shard, is_tied, is_averaged, is_reduced_once in cases:
        whole = two_layers(is_tied=is_tied)
        pipeline = samo.Pipeline(whole, next_token_loss, mesh, 2, timeout_s=TIMEOUT)
        compress(pipeline.module, two_layers(is_tied=is_tied))
        samo.replicate(
            pipeline.module, mesh["data"], shard=shard, average=is_averaged, timeout_s=TIMEOUT
        )
        opt = torch.optim.SGD(samo.parameters(pipeline.module), lr=0.1)
        for seed in range(4):
            x, y = tokens(8, seed)
            mine = slice(4 * place, 4 * place + 4)
            is_last = seed % 2 == 1 or not is_reduced_once
            pipeline.step(x[mine], target=y[mine], is_last=is_last)
            if seed % 2:  # gradients of two batches add up
                opt.step()
                opt.zero_grad()
        reductions = samo.traffic(pipeline.module).reductions
        state = {k: v.clone() for k, v in pipeline.module.state_dict().items()}
        pipeline.close()
        found.append({"reductions": reductions, "state": state})
    return found


def one_process(is_tied: bool, factor: float) -> dict[str, torch.Tensor]:
    model = two_layers(is_tied=is_tied)
    compress(model, two_layers(is_tied=is_tied))
    opt = torch.optim.SGD(samo.parameters(model), lr=0.1 * factor)
    for seed in range(4):
        x, y = tokens(8, seed)
        next_token_loss(model(x), y).backward()
        if seed % 2:
            opt.step()
            opt.zero_grad()
    return dict(model.state_dict())


def test_replicated_stages_train_as_one_process_with_and_without_tied_weights() -> None:
    cases: list[tuple[Any, ...]] = [
        (None, True, True, False),
        ("state", True, True, False),
        ("state", False, True, False),
        (None, True, False, False),
        ("state", True, False, False),
        (None, True, True, True),
        ("state", True, True, True),
    ]
    everyones = run_ranks(4, grid, cases, timeout_s=100)
    for number, (shard, is_tied, is_averaged, is_reduced_once) in enumerate(cases):
        wanted = one_process(is_tied, 1.0 if is_averaged else 2.0)
        case = f"shard={shard} tied={is_tied} averaged={is_averaged} once={is_reduced_once}"
        for rank, found in enumerate(everyones):
            assert found[number]["reductions"] == (2 if is_reduced_once else 4), case
            for name, value in found[number]["state"].items():
                # Sums of other pieces in another order, over four batches.
                is_close = torch.allclose(value, wanted[name], rtol=1e-4, atol=1e-6)
                assert is_close, f"{case}, rank {rank}, {name}"
        first = everyones[0][number]["state"]["embed.weight"]
        assert not torch.equal(first, two_layers(is_tied=is_tied).embed.weight)
        if is_tied:
            for found in everyones:
                for name in {"embed.weight", "head.weight"} & found[number]["state"].keys():
                    assert torch.equal(found[number]["state"][name], first), case


# Every schedule beside replicas, in float64

Case = tuple[str, str, str | None]
"""Schedule, optimizer, what is sharded."""
CASES: list[Case] = [
    *(
        (schedule, name, shard)
        for schedule in ("message-driven", "1f1b", "gpipe", "interleaved")
        for name, shard in (("sgd", None), ("adamw", "state"))
    ),
    ("message-driven", "sgd", "state"),
    ("message-driven", "adamw", None),
]
STEPS = 4


def every_schedule(rank: int, num_ranks: int, pipe: int) -> list[tuple[list[Tensor], Any]]:
    """Return the losses of this rank's replica and the weights of its stage, for each case."""
    mesh = samo.mesh(pipe=pipe)
    place, num_replicas = mesh["data"].get_local_rank(), num_ranks // pipe
    found = []
    for schedule, name, shard in CASES:
        pipeline = samo.Pipeline(
            two_layers().double(),
            next_token_loss,
            mesh,
            2,
            schedule=schedule,
            timeout_s=TIMEOUT,
        )
        compress(pipeline.module, two_layers())
        samo.replicate(pipeline.module, mesh["data"], shard=shard, timeout_s=TIMEOUT)
        opt = optimizer(name, pipeline.module, is_compressed=True)
        losses = []
        for seed in range(STEPS):
            x, y = (part.chunk(num_replicas)[place] for part in tokens(8, seed))
            losses.append(pipeline.step(x, target=y))
            opt.step()
            opt.zero_grad()
        assert samo.traffic(pipeline.module).reductions == STEPS, "once a step"
        state = {k: v.clone() for k, v in pipeline.module.state_dict().items()}
        pipeline.close()
        found.append((losses, state))
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
    for number, (schedule, name, shard) in enumerate(CASES):
        case = f"{pipe}x{4 // pipe} {schedule} {name} shard={shard}"
        losses, state = whole_batches(name)
        assert losses.dtype == torch.float64
        # Replicas of one stage follow each other: every replica has its loss on all stages.
        ours = torch.stack([torch.stack(found[number][0]) for found in everyones]).mean(0)
        torch.testing.assert_close(ours, losses, rtol=1e-10, atol=0, msg=case)
        for found in everyones:
            for key, value in found[number][1].items():
                off = (value - state[key]).abs().max() / state[key].abs().max()
                assert off <= 1e-10, f"{case}: {key} is off by {off:.2e}"
        assert {key for found in everyones for key in found[number][1]} == state.keys()
