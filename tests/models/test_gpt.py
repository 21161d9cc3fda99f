"""The GPT of samo, and a model of Hugging Face through the public interface."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import samo
from samo.models.gpt import GPTConfig
from tests.core.twins import hugging_face
from tests.meters import small_gpt, tokens


def test_a_hugging_face_model_is_saved_and_loaded_as_usual(tmp_path: Any) -> None:
    model = hugging_face("Llama")
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    dense = samo.dense_state_dict(model)
    samo.decompress_(model).save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in dense.items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert samo.Masks.from_zeros(loaded).sparsity == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_in_parts_is_the_loss(reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_gpt(), tokens()
    targets = ids.roll(-1, 1)
    targets[:, -3:] = -100
    logits = model(ids).flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, targets.flatten(), reduction=reduction)
    expected.backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    monkeypatch.setattr("samo.models.chunked_loss.MAX_LOGITS", 20 * 331)  # 16 of 95 tokens at once
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
