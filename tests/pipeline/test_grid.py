"""Pipelines whose stages have replicas: equal to one process on the whole batch."""

import torch
import torch.distributed as dist
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
            for name, value in weights.items():  # bitmaps are whole numbers, and equal
                most = 1e-10 * float(state[name].abs().max()) if value.is_floating_point() else 0
                torch.testing.assert_close(value, state[name], rtol=0, atol=most, msg=name)
        assert {name for _, weights in found for name in weights} >= state.keys()
        for first, second in ((0, 1), (2, 3)):  # replicas of one stage
            for name, value in found[first][1].items():
                assert torch.equal(value, found[second][1][name]), f"{case}: {name}"
        if case[2]:
            assert torch.equal(found[0][1]["embed.weight"], found[2][1]["head.weight"])


class Boom(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 3:
            raise ValueError("boom in layer")
        return super().forward(x)


def failing_work(rank: int, num_ranks: int) -> str:
    mesh = samo.mesh(pipe=2, data=2)
    layers = [Boom(4, 4) for _ in range(2)]
    pipeline = samo.Pipeline(layers, nn.functional.mse_loss, mesh, 2, timeout_s=10)
    try:
        pipeline.step(torch.ones(4, 4), target=torch.ones(4, 4))
    except (ValueError, samo.PeerError) as error:
        return str(error)
    return ""


def test_replicas_name_the_rank_that_failed_in_another_pipeline() -> None:
    said = run_ranks(4, failing_work, lost={3}, timeout_s=40)
    for rank in (0, 1, 2):
        assert "rank 3" in said[rank], said
        assert "boom in layer" in said[rank], said
