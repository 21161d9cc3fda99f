"""The GPT of samo."""

from typing import Any

import pytest
import torch
from torch import nn

from samo.models.gpt import GPTConfig
from tests.meters import small_gpt, tokens


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_in_parts_is_the_loss(reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_gpt(), tokens()
    targets = ids.roll(-1, 1)
    targets[:, -3:] = -100
    logits = model(ids).flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, targets.flatten(), reduction=reduction)
    expected.backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    monkeypatch.setattr("samo.models.sum_in_chunks.MAX_LOGITS", 20 * 331)  # 16 of 95 tokens at once
    sizes: list[int] = []
    model.head.register_forward_hook(lambda _, __, output: sizes.append(len(output)))
    model.zero_grad()
    found = model(ids, targets, reduction=reduction)
    found.backward()
    assert max(sizes) == 16
    assert sum(sizes) == 2 * 95
    torch.testing.assert_close(found, expected)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, wanted[name], msg=name)


def test_a_gpt_needs_heads_that_divide_its_width() -> None:
    with pytest.raises(ValueError, match="num_heads=3 must divide width=64"):
        GPTConfig(width=64, num_heads=3)
