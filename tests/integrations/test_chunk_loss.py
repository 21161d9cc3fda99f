"""Losses in chunks equal the usual ones, whatever a model does to its logits."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samo
from samo.errors import ConfigError
from samo.integrations.chunk_loss import Distillation, Logits, deferred_logits
from tests.core.test_frameworks import logged, texts, trainer_of
from tests.integrations.tiny_lms import FAMILIES, VOCAB, tiny_lm

CLOSE = {"rtol": 0, "atol": 1e-12}  # float64; sums of 50 losses of about 5
CHUNK = 4 * VOCAB  # 4 of 51 tokens at once


def batch(rows: int = 3) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCAB, (rows, 17), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 5:8] = -100
    return ids, labels


def plain_loss(model: Any, ids: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction
    )


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_chunked(model: nn.Module, wanted: Tensor, wanted_grads: dict[str, Tensor]) -> None:
    """Compare loss and gradients with the usual ones of the same batch."""
    ids, labels = batch()
    outputs = model(input_ids=ids, labels=labels, use_cache=False)
    assert isinstance(outputs.logits, Logits)
    torch.testing.assert_close(outputs.loss, wanted, **CLOSE)
    assert_equal(gradients(model, outputs.loss), wanted_grads)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_all_logits_at_once(family: str) -> None:
    model = tiny_lm(family).double()
    wanted = plain_loss(model, *batch())
    wanted_grads = gradients(model, wanted)
    assert samo.chunk_loss_(model, max_logits=CHUNK) is model
    copied = copy.deepcopy(model)  # whose hooks must not lead to the original
    for chunked in (model, copied):
        assert_chunked(chunked, wanted, wanted_grads)


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])  # tied and not
def test_a_compressed_head_is_chunked_too(family: str, weights: Any) -> None:
    model = tiny_lm(family).double()
    name = "transformer.wte.weight" if family == "gpt2" else "lm_head.weight"
    masks = samo.prune(model, 0.5, rules={name: 0.5})
    assert name in masks
    samo.compress_(model, masks, weights=weights)
    wanted = plain_loss(model, *batch())
    wanted_grads = gradients(model, wanted)
    assert_chunked(samo.chunk_loss_(model, max_logits=CHUNK), wanted, wanted_grads)


def test_logits_never_exist_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, labels) = samo.chunk_loss_(tiny_lm(), max_logits=CHUNK), batch()
    sizes = []
    linear = F.linear

    def watched(*args: Any) -> Tensor:
        found = linear(*args)
        sizes.append(found.numel() if found.shape[-1] == VOCAB else 0)
        return found

    monkeypatch.setattr(F, "linear", watched)
    model(input_ids=ids, labels=labels).loss.backward()
    assert sum(size > 0 for size in sizes) == 2 * 13  # in forward, and again in backward
    assert max(sizes) == CHUNK


def test_trainers_arguments_mean_what_they_do_in_transformers() -> None:
    model, (ids, labels) = tiny_lm(), batch()
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    arguments: list[dict[str, Any]] = [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"shift_labels": shifted},
        {"shift_labels": shifted, "num_items_in_batch": 1},
    ]
    wanted = [model(input_ids=ids, labels=labels, **given).loss for given in arguments]
    samo.chunk_loss_(model, max_logits=CHUNK)
    for given, loss in zip(arguments, wanted):
        found = model(input_ids=ids, labels=labels, **given).loss
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)  # fp32, summed in another order


def test_logits_are_computed_where_they_are_used() -> None:
    model, (ids, labels) = tiny_lm("gemma2"), batch()
    wanted = model(input_ids=ids).logits
    samo.chunk_loss_(model, max_logits=CHUNK)
    found = model(input_ids=ids, labels=labels).logits
    assert found.shape == wanted.shape
    assert "not computed yet" in repr(found)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert torch.equal(found + 0, wanted)
    assert torch.equal(found / wanted.abs().max(), wanted / wanted.abs().max())
    with torch._C.DisableTorchFunctionSubclass():  # as code in C++ sees it
        assert torch.equal(torch.add(found, 0), wanted)
    assert type(model(input_ids=ids).logits) is Tensor  # without labels nothing changes


def test_adapters_are_chunked_too() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_lm("llama").double(), settings)
    wanted = plain_loss(model, *batch())
    wanted_grads = gradients(model, wanted)
    assert_chunked(samo.chunk_loss_(model, max_logits=CHUNK), wanted, wanted_grads)


def test_another_loss_function_stays() -> None:
    model, (ids, labels) = tiny_lm(), batch()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    samo.chunk_loss_(model, max_logits=CHUNK)
    outputs = model(input_ids=ids, labels=labels)
    assert type(outputs.logits) is Tensor
    assert torch.equal(outputs.loss, outputs.logits.square().mean())


def test_what_a_model_writes_to_its_logits_is_not_lost() -> None:
    """Chameleon forbids the tokens of images."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    images = {f"IMGIMG{chr(65 + i)}Z": i + 4 for i in range(16)}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCAB}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    blocks = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}
    vision = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "resolution": 32}
    config = ChameleonConfig(
        **sizes, **heads, vq_config=vision | blocks, vocabulary_map=images | {"<image>": 3}
    )
    model, (ids, labels) = ChameleonForConditionalGeneration(config).eval().double(), batch()
    ids, labels = ids.clamp(min=24), labels.where(labels < 0, labels.clamp(min=24))
    wanted = model(input_ids=ids, labels=labels)
    wanted_grads = gradients(model, wanted.loss)
    samo.chunk_loss_(model, max_logits=CHUNK)
    found = model(input_ids=ids, labels=labels)
    torch.testing.assert_close(found.loss, wanted.loss, **CLOSE)
    torch.testing.assert_close(found.logits + 0, wanted.logits, **CLOSE)
    assert_equal(gradients(model, found.loss), wanted_grads)


def test_logits_that_were_computed_go_to_the_usual_loss() -> None:
    model, (ids, labels) = tiny_lm(), batch()
    outputs = model(input_ids=ids, labels=labels)
    samo.chunk_loss_(model)
    assert torch.equal(model.loss_function(outputs.logits, labels, VOCAB), outputs.loss)
    teacher = Distillation(outputs.logits, 0.5, 1.0)
    with pytest.raises(ConfigError, match="distillation needs logits that the model leaves"):
        model.loss_function(outputs.logits, labels, VOCAB, distillation=teacher)


def test_other_models_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"takes a causal language model of transformers.*got Linear"
    ):
        samo.chunk_loss_(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="max_logits must be a whole number, 1 or more, got 0"):
        samo.chunk_loss_(tiny_lm(), max_logits=0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_distillation_equals_a_loop_over_all_logits(family: str) -> None:
    model, teacher = tiny_lm(family).double(), tiny_lm(family, seed=1).double()
    ids, labels = batch()
    targets, heat, share = labels[:, 1:].flatten(), 2.0, 0.3
    with torch.no_grad():
        goal = teacher(input_ids=ids).logits[:, :-1].flatten(0, 1)
    student = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    chances = F.softmax(goal / heat, -1)
    gap = chances * (F.log_softmax(goal / heat, -1) - F.log_softmax(student / heat, -1))
    soft = gap.sum(-1)[targets != -100].sum() * heat**2
    wanted = (1 - share) * F.cross_entropy(student, targets, reduction="sum") + share * soft
    wanted_grads = gradients(model, wanted)

    for each in (model, teacher):
        samo.chunk_loss_(each, max_logits=CHUNK)
    with torch.no_grad():
        logits = deferred_logits(teacher, input_ids=ids)
    assert isinstance(logits, Logits)
    distillation = Distillation(logits, share, heat)
    loss = model(input_ids=ids, labels=labels, num_items_in_batch=1, distillation=distillation).loss
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-10)  # of about 1e4
    found = gradients(model, loss)
    assert found.keys() == wanted_grads.keys()
    for name, grad in wanted_grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore")  # of transformers and accelerate, about each other
def test_trainer_trains_and_evaluates_as_before(tmp_path: Path) -> None:
    plain, chunked = tiny_lm("gemma2"), samo.chunk_loss_(tiny_lm("gemma2"), max_logits=CHUNK)
    found = []
    for model in (plain, chunked):
        trainer = trainer_of(model, tmp_path, max_steps=3)
        trainer.train()
        predicted = trainer.predict(texts()[:6])
        found.append([*logged(trainer, "loss"), predicted.metrics["test_loss"]])
        assert predicted.predictions.shape == (6, 10, VOCAB)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
