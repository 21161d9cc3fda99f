"""Gradients that are cleared between the batches of one optimizer step are gone on all stages."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samo
from samo.pipeline.tied import Tie
from tests.pipeline.cases import compress, next_token_loss, tiny_gpt, tokens
from tests.ranks import run_ranks

TIMEOUT = 20
CASES: list[tuple[bool, str]] = [
    (is_compressed, how) for is_compressed in (False, True) for how in ("to none", "to zero")
]
"""Whether compressed, and how cleared."""


def clear_between(rank: int, num_ranks: int) -> list[dict[str, Tensor]]:
    """Compute three batches, clear gradients before the last one, and return what it leaves.

    All replicas have the same batches, so that their mean is what each of them has.
    """
    mesh = samo.mesh(pipe=2)
    found = []
    for is_compressed, how in CASES:
        pipeline = samo.Pipeline(
            tiny_gpt(is_tied=True), next_token_loss, mesh, 2, timeout_s=TIMEOUT
        )
        module = pipeline.module
        if is_compressed:
            compress(module, tiny_gpt(is_tied=True))
        for seed, is_last in ((0, True), (1, False), (2, True)):
            if seed == 2:
                module.zero_grad(set_to_none=how == "to none")
            x, y = tokens(8, seed)
            pipeline.step(x, target=y, is_last=is_last)
        found.append({name: param.grad.clone() for name, param in module.named_parameters()})
        pipeline.close()
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_was_cleared_between_batches_is_not_added_to_tied_weights(num_ranks: int) -> None:
    everyones = run_ranks(num_ranks, clear_between)
    for number, (is_compressed, how) in enumerate(CASES):
        model = tiny_gpt(is_tied=True)
        if is_compressed:
            compress(model, tiny_gpt(is_tied=True))
        x, y = tokens(8, 2)
        next_token_loss(model(x), y).backward()
        wanted = dict(model.named_parameters())
        for found in everyones:
            for name, grad in found[number].items():
                expected = wanted["embed.weight" if name == "head.weight" else name].grad
                case = f"compressed={is_compressed} {how}: {name}"
                torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6, msg=case)


def test_what_was_set_aside_stays_unless_gradients_were_cleared() -> None:
    tie, module = Tie(("0.weight",), (0, 1)), nn.Sequential(nn.Linear(2, 2))
    weight = module[0].weight

    def between(brought: float | None, do: Any) -> Tensor | None:
        weight.grad = torch.full((2, 2), 10.0)
        aside = tie.set_aside(module)
        weight.grad = None if brought is None else torch.full((2, 2), brought)
        version = tie.leave(module, aside)
        do()
        aside = tie.resume(module, aside, version)
        if brought is None:
            assert weight.grad is None or not weight.grad.any(), "it is not counted twice"
        return aside

    for brought in (3.0, 0.0, None):
        kept = between(brought, lambda: None)
        assert kept is not None
        assert torch.equal(kept, torch.full((2, 2), 10.0)), brought
        assert between(brought, module.zero_grad) is None
        assert between(brought, lambda: module.zero_grad(set_to_none=False)) is None
