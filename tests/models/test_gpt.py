"""Real architectures through the public interface, without special cases."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import samo
from samo.models.gpt import GPTConfig
from tests.meters import Experts, SmallResNet, small_gpt, tokens


def language_loss(model: nn.Module) -> Tensor:
    ids = torch.arange(24).view(2, 12) % 61
    return model(input_ids=ids, labels=ids).loss


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=61, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=32,
        intermediate_size=48, vocab_size=61, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, hidden_size=32,
        intermediate_size=48, vocab_size=61, num_local_experts=4, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def image_loss(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 6 * 3 * 8 * 8).view(6, 3, 8, 8)
    x = x.to(model.conv1.weight.dtype)
    return nn.functional.cross_entropy(model(x).float(), torch.arange(6) % 5)


def expert_loss(model: nn.Module) -> Tensor:
    x = torch.sin(torch.arange(20.0 * 16).view(20, 16)).to(model.router.weight.dtype)
    return (model(x).float() - 1).square().mean()


def tied_loss(model: nn.Module) -> Tensor:
    ids = torch.arange(38).view(2, 19)
    return model(ids, ids)


def encoder_loss(model: nn.Module) -> Tensor:
    x = torch.sin(torch.arange(2.0 * 7 * 16).view(2, 7, 16)).to(model.linear1.weight.dtype)
    return (model(x).float() - 1).square().mean()


MODELS: dict[str, tuple[Any, Any]] = {
    "gpt2": (gpt2, language_loss),
    "llama": (llama, language_loss),
    "mixtral": (mixtral, language_loss),
    "resnet": (SmallResNet, image_loss),
    "experts": (lambda: Experts(4, 16), expert_loss),
    "tied": (lambda: small_gpt(is_tied=True), tied_loss),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        encoder_loss,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_with_its_mask_kept(name: str) -> None:
    build, loss_of = MODELS[name]
    dtype = torch.float32 if name in ("gpt2", "resnet") else torch.bfloat16
    model = build()
    masks = samo.prune(model, sparsity=0.75)
    samo.compress_(model, masks, dtype=dtype)
    opt = samo.AdamW(samo.param_groups(model, weight_decay=0.1), lr=1e-2)
    model.train()
    losses = []
    for _ in range(20):
        opt.zero_grad()
        loss = loss_of(model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    dense = samo.dense_state_dict(model)
    for key, mask in masks.items():
        assert not dense[key][~mask.to_bool()].any()
    account = samo.ledger(model, opt)
    assert account.measured_bytes == account.predicted_bytes


def test_a_hugging_face_model_is_saved_and_loaded_as_usual(tmp_path: Any) -> None:
    model = llama()
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    dense = samo.dense_state_dict(model)
    samo.decompress_(model).save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in dense.items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert samo.Masks.from_zeros(loaded).sparsity == pytest.approx(0.5, abs=0.01)


def test_hugging_face_gradient_checkpointing_works() -> None:
    grads = {}
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = llama()
        samo.compress_(model, samo.prune(model, 0.5))
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        model.train()
        language_loss(model).backward()
        grads[is_checkpointed] = [param.grad for param in model.parameters()]
    for plain, checkpointed in zip(grads[False], grads[True]):
        assert torch.equal(plain, checkpointed)


def test_autocast_over_fp32_weights_works() -> None:
    model = small_gpt()
    samo.compress_(model, samo.prune(model, 0.9))
    batch = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        model(batch, batch).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.isfinite().all(), name


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_in_parts_is_the_loss(reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_gpt(), tokens()
    targets = ids.roll(-1, 1)
    targets[:, -3:] = -100
    logits = model(ids).flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, targets.flatten(), reduction=reduction)
    expected.backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    monkeypatch.setattr("samo.models.gpt._MAX_LOGITS", 20 * 331)  # 16 of 95 tokens at once
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
