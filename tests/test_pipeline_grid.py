"""Pipelines beside each other whose stages are replicated: equal to one process on the whole batch."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import samo
from tests.pipeline_cases import compress, next_token_loss, tiny_gpt, tokens
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
        held: list[nn.Module] = []
        batch = {"is_last": True}

        def context(is_last: bool, held: list[nn.Module] = held, batch: Any = batch) -> Any:
            is_reduced = not held or (is_last and batch["is_last"])
            return nullcontext() if is_reduced else samo.no_sync(held[0])

        pipeline = samo.Pipeline(
            whole, next_token_loss, mesh, 2, timeout=TIMEOUT, last_micro_batch=context
        )
        held.append(pipeline.module)
        compress(pipeline.module, two_layers(is_tied=is_tied))
        samo.replicate(
            pipeline.module, mesh["data"], shard=shard, average=is_averaged, timeout_s=TIMEOUT
        )
        opt = torch.optim.SGD(samo.parameters(pipeline.module), lr=0.1)
        for seed in range(4):
            x, y = tokens(8, seed)
            mine = slice(4 * place, 4 * place + 4)
            batch["is_last"] = seed % 2 == 1 or not is_reduced_once
            pipeline.step(x[mine], target=y[mine], **batch)
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
