"""Compressed folders and the layout sparse-bitmask: nothing is lost on the way."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, Trainer, TrainingArguments

import samo
from samo.core.modules import BITMAP, named_weights
from samo.integrations.export import Format
from samo.integrations.hf_quantizer import SamoConfig
from samo.integrations.model_folders import open_compressed, open_masks, open_model
from tests.integrations.cases import FAMILIES, IDS, load, logits, names, pruned, trained
from tests.meters import LiveBytes


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.values.detach() for name, weight in named_weights(model)}


def pruned_bytes(folder: Path) -> int:
    """Bytes of pruned weights in a compressed folder."""
    state = load_file(folder / "model.safetensors")
    pruned = {name.removesuffix(BITMAP) for name in state if name.endswith(BITMAP)}
    return sum(state[name].nbytes + state[name + BITMAP].nbytes for name in pruned)


def assert_equal_weights(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = samo.dense_state_dict(model), samo.dense_state_dict(other)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name].to(theirs[name].dtype), theirs[name]) for name in ours)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", get_args(Format))
def test_a_trained_model_goes_out_and_comes_back(
    family: str, format: Format, tmp_path: Path
) -> None:
    model = trained(family)
    masks, expected = samo.masks(model), logits(model)
    out = samo.export(model, tmp_path / "out", format=format)
    assert model.config.to_dict().get("quantization_config") is None  # unchanged
    dense = open_model(out)
    assert dense.dtype == torch.bfloat16
    assert torch.equal(logits(dense), expected)
    assert_equal_weights(dense, samo.decompress_(open_compressed(out, weights="streamed")))
    found = open_masks(out, dense)
    assert found == masks
    for name, mask in masks.items():
        assert not dense.get_parameter(name)[~mask.to_bool()].any()
    if format == "compressed":
        again = load(out)
        assert isinstance(again, type(model))
        assert torch.equal(logits(again), expected)
        assert samo.masks(again) == masks
        assert open_model(out, dtype=torch.float32).dtype == torch.float32
    if format == "dense":
        assert torch.equal(logits(load(out)), expected)


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_a_dense_model_and_its_masks_make_the_same_folder_as_a_compressed_one(
    family: str, tmp_path: Path
) -> None:
    model, masks = pruned(family)
    for format in get_args(Format):
        samo.export(model, tmp_path / f"dense-{format}", format=format, masks=masks)
    samo.compress_(model, masks)
    for format in get_args(Format):
        samo.export(model, tmp_path / f"out-{format}", format=format)
        first, second = (
            load_file(tmp_path / f"{kind}-{format}" / "model.safetensors")
            for kind in ("dense", "out")
        )
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("format", get_args(Format))
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_tied_and_pruned_embedding_stays_tied(
    format: Format, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    model, masks = pruned("Llama", tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    masks = samo.Masks({**masks, "model.embed_tokens.weight": samo.Mask.from_bool(embedding > 0)})
    samo.compress_(model, masks, dtype=dtype)
    out = samo.export(model, tmp_path / "out", format=format)
    again = open_model(out)
    assert torch.equal(logits(again), logits(model))
    assert open_masks(out, again) == masks  # under one of its two names
    again = open_compressed(out)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))
    opt = samo.AdamW(again.parameters())
    again(input_ids=IDS, labels=IDS).loss.backward()
    opt.step()
    assert torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)


def test_save_pretrained_writes_what_from_pretrained_reads_and_rounds_nothing(
    tmp_path: Path,
) -> None:
    model = trained("Mistral")
    model.generation_config.max_length = 77
    model.save_pretrained(tmp_path / "first", max_shard_size="10KB")
    assert len(list((tmp_path / "first").glob("model-*"))) > 2
    again = load(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    third = load(tmp_path / "second")
    for other in (again, third):
        assert other.dtype == torch.bfloat16
        assert other.generation_config.max_length == 77
        found = values_of(other)
        assert all(torch.equal(found[name], value) for name, value in values_of(model).items())
    # With masks of the model, a resume of Trainer loads the same file.
    model.load_state_dict(load_file(tmp_path / "second" / "model.safetensors"))
    # Decompressed, or with a dense state dict, it writes an ordinary folder.
    model.save_pretrained(tmp_path / "dense", state_dict=samo.dense_state_dict(model))
    samo.decompress_(model).save_pretrained(tmp_path / "plain")
    for name in ("dense", "plain"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert "quantization_config" not in config
        assert_equal_weights(load(tmp_path / name), model)


def test_a_loaded_model_is_like_one_that_compress_made(tmp_path: Path) -> None:
    model = trained("Llama")
    again = load(samo.export(model, tmp_path / "out", format="compressed"))
    for (name, ours), (_, theirs) in zip(named_weights(model), named_weights(again), strict=True):
        assert (ours.is_resident, ours.dtype) == (theirs.is_resident, theirs.dtype), name
        assert ours.values.dtype == theirs.values.dtype == torch.float32
        assert ours.layout.grad_dtype == theirs.layout.grad_dtype
    assert not getattr(again, "is_quantized", False)
    assert again.config.to_dict().get("quantization_config") is None
    assert not hasattr(again.config, "_is_quantized")
    for one in (model, again):
        one.train()
        one.zero_grad()
        one(input_ids=IDS, labels=IDS).loss.backward()
    grads = [{name: param.grad for name, param in one.named_parameters()} for one in (model, again)]
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


@pytest.mark.parametrize("place", ["meta", "disk"])
def test_a_model_is_not_loaded_to_where_nothing_is_held(place: str, tmp_path: Path) -> None:
    out = samo.export(trained("Llama"), tmp_path / "out", format="compressed")
    for where in ({"": place}, {"model": "cpu", "lm_head": place}):
        with pytest.raises(ValueError, match=f"cannot be loaded to '{place}', got device_map="):
            load(out, device_map=where)


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_a_model_is_not_loaded_without_its_head(family: str, tmp_path: Path) -> None:
    out = samo.export(trained(family), tmp_path / "out", format="compressed")
    with pytest.raises(samo.CheckpointError, match=rf"without its head, as {family}Model; load"):
        AutoModel.from_pretrained(out)


def test_pruned_tensors_take_a_sixth_of_dense_ones(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    model, masks = pruned("Llama", **sizes)
    kept, numel = masks.kept, masks.numel
    out = samo.export(model, tmp_path / "out", format="compressed", masks=masks)
    assert pruned_bytes(out) <= 4 * kept + numel / 8 + 40 * len(masks)  # fp32, as the model
    out = samo.export(
        model, tmp_path / "half", format="compressed", masks=masks, dtype=torch.bfloat16
    )
    dense = sum(2 * mask.numel for mask in masks.values())
    assert pruned_bytes(out) / dense <= 0.17


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # says that it is used
@pytest.mark.parametrize("how", ["config", "quantization_config", "open_compressed"])
def test_loading_streamed_never_holds_the_dense_model(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the meter sees one thread
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 64}
    model, masks = pruned("Llama", **sizes)
    dense_bytes = sum(2 * param.numel() for param in model.parameters())
    samo.compress_(model, masks, dtype=torch.bfloat16)
    out = samo.export(model, tmp_path / "out", format="compressed")
    with LiveBytes() as meter:
        if how == "config":
            config = AutoConfig.from_pretrained(out)
            config.quantization_config["weights"] = "streamed"
            again = load(out, config=config)
        elif how == "quantization_config":
            again = load(out, quantization_config=SamoConfig(weights="streamed"))
        else:
            again = open_compressed(out, weights="streamed")
    assert not any(w.is_resident for _, w in named_weights(again) if w.mask is not None)
    # Values in float32, twice the bytes of the file, and bitmaps: in the masks and as read.
    assert meter.peak_bytes < 0.6 * dense_bytes
    assert torch.equal(logits(again), logits(model))
    with LiveBytes() as meter:
        load(out)
    assert meter.peak_bytes > dense_bytes  # resident; so the meter sees dense weights


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_parameters_are_frozen_by_transformers_too(tmp_path: Path) -> None:
    out = samo.export(trained("Llama"), tmp_path / "out", format="compressed")

    def freeze(model: nn.Module) -> None:
        model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]

    again = load(out, quantization_config=SamoConfig(prepare=freeze))
    frozen = [name for name, param in again.named_parameters() if not param.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]


def test_trainer_trains_a_loaded_model_and_resumes_from_its_folder(tmp_path: Path) -> None:
    out = samo.export(trained("Llama"), tmp_path / "out", format="compressed")
    data = [{"input_ids": row, "labels": row} for row in IDS]

    def train(model: Any, name: str, checkpoint: Path | None = None) -> dict[str, torch.Tensor]:
        args = TrainingArguments(
            tmp_path / name, max_steps=4, save_steps=2, use_cpu=True, report_to=[],
            disable_tqdm=True, learning_rate=1e-2,
        )  # fmt: skip
        Trainer(model, args, train_dataset=data).train(resume_from_checkpoint=checkpoint)
        return values_of(model)

    model = load(out)
    before, masks = {name: p.clone() for name, p in values_of(model).items()}, samo.masks(model)
    after = train(model, "whole")
    assert samo.masks(model) == masks
    assert all(not torch.equal(before[name], value) for name, value in after.items())
    checkpoint = tmp_path / "whole" / "checkpoint-2"  # which save_pretrained wrote
    resumed = train(load(checkpoint), "resumed", checkpoint)
    assert all(torch.equal(resumed[name], value) for name, value in after.items())


def test_a_bitmask_folder_has_the_layout_of_compressed_tensors(tmp_path: Path) -> None:
    model, masks = pruned("Llama")
    out = samo.export(model, tmp_path / "out", format="bitmask", masks=masks)
    state = load_file(out / "model.safetensors")
    dense = model.model.layers[0].mlp.up_proj.weight.detach()
    prefix = "model.layers.0.mlp.up_proj"
    assert state[f"{prefix}.shape"].tolist() == [64, 32]
    assert torch.equal(state[f"{prefix}.compressed"], dense[dense != 0])
    counts = (dense != 0).sum(1)
    assert torch.equal(state[f"{prefix}.row_offsets"], counts.cumsum(0) - counts)
    bitmask = state[f"{prefix}.bitmask"]
    assert (bitmask.dtype, tuple(bitmask.shape)) == (torch.uint8, (64, 4))
    assert all(
        bool(bitmask[row, column // 8] >> (column % 8) & 1) == bool(dense[row, column])
        for row in (0, 63)
        for column in range(32)
    )
    assert "lm_head.weight" in state  # dense: a bitmask would be larger
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["sparsity_config"]["format"] == "sparse-bitmask"
    assert prefix in config["sparsity_config"]["targets"]
    assert "masks.safetensors" in names(out)
    sharded = samo.export(
        model, tmp_path / "parts", format="bitmask", masks=masks, max_shard_size="30KB"
    )
    assert torch.equal(logits(open_model(sharded)), logits(model))
    (out / "masks.safetensors").unlink()  # which only samo writes
    assert open_masks(out, open_model(out)) is None
    kept = samo.masks(open_compressed(out)).kept
    assert kept == masks.kept - 1  # all but the kept weight that is exactly 0
