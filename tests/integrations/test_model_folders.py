"""Folders of several kinds are opened, and bad ones are refused."""

import hashlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import samo
from samo.checkpoint import read_manifest
from samo.checkpoint.manifest import encode_manifest
from samo.errors import CheckpointError, MaskError
from samo.integrations.folder_files import edit_config
from samo.integrations.model_folders import (
    open_compressed,
    open_masks,
    open_model,
    tokenizer_folder,
)
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig
from tests.integrations.cases import exported, logits, pruned


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, _ = pruned("Llama")
    return samo.export(model, tmp_path / "llama", max_shard_size="30KB")


def save_run(run: Path, model: Any, masks: samo.Masks, **options: Any) -> Path:
    """Write what a run of samo finetune has of its model; return the checkpoint."""
    model.config.save_pretrained(run / "hugging-face")
    samo.compress_(model, masks, **options)
    samo.save(run / "checkpoints" / "last", model)
    return run / "checkpoints" / "last"


def test_a_run_of_finetune_is_its_config_and_its_checkpoint(tmp_path: Path) -> None:
    model, masks = pruned("Llama", tie_word_embeddings=True)
    run = tmp_path / "run"
    checkpoint = save_run(run, model, masks)
    model.generation_config.max_length = 77
    model.generation_config.save_pretrained(run / "hugging-face")
    (run / "hugging-face" / "tokenizer.json").write_text("{}")
    (run / "run.json").write_text("{}")
    for path in (run, checkpoint):
        again = open_model(path)
        assert torch.equal(logits(again), logits(model))
        assert again.generation_config.max_length == 77
        assert open_masks(path, again) == masks
        assert tokenizer_folder(path) == run / "hugging-face"
        again = open_compressed(path, weights="streamed")
        assert torch.equal(logits(again), logits(model))
        assert samo.masks(again) == masks
        assert again.lm_head.weight is again.model.embed_tokens.weight
    assert open_model(run, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_masks_and_values_of_a_checkpoint_fit_each_other(tmp_path: Path) -> None:
    checkpoint = save_run(tmp_path, *pruned("Llama"))
    manifest = read_manifest(checkpoint)
    name = "weights.safetensors"
    file = manifest.data / name
    state = load_file(file)
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(7)
    save_file(state, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.content["files"][name] = {"bytes": file.stat().st_size, "sha256": digest}
    (checkpoint / "manifest.json").write_bytes(encode_manifest(manifest.content))
    for act in (open_model, open_compressed):
        with pytest.raises(CheckpointError, match=r"up_proj.weight' keeps 205 values, and it has "):
            act(checkpoint)


def test_the_dtype_of_a_checkpoint_is_one(tmp_path: Path) -> None:
    checkpoint = save_run(tmp_path, *pruned("Llama"))
    content = read_manifest(checkpoint).content
    content["model"]["dtype"] = "load"
    (checkpoint / "manifest.json").write_bytes(encode_manifest(content))
    with pytest.raises(CheckpointError, match=r"manifest.json' is damaged: its dtype is 'load'"):
        open_compressed(checkpoint)


def test_a_pruned_embedding_of_a_run_stays_tied(tmp_path: Path) -> None:
    model, masks = pruned("Llama", tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    masks = samo.Masks({**masks, "model.embed_tokens.weight": samo.Mask.from_bool(embedding > 0)})
    again = open_compressed(save_run(tmp_path, model, masks, dtype=torch.bfloat16))
    assert again.dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(model))
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_tied_gpt_is_opened_compressed(tmp_path: Path) -> None:
    config = GPTConfig(is_tied=True, num_layers=1, width=32, num_heads=2)
    gpt = GPT(config)
    samo.compress_(gpt, samo.prune(gpt, 0.8))
    samo.save(tmp_path / "gpt", gpt, extra={"model": asdict(config)})
    tokens_BT = torch.arange(12).view(2, 6)
    assert torch.equal(open_compressed(tmp_path / "gpt")(tokens_BT), gpt(tokens_BT))


def test_masks_load_from_all_that_has_them(tmp_path: Path) -> None:
    model, masks = pruned("Llama")
    for format in ("dense", "compressed"):
        samo.export(model, tmp_path / format, format=format, masks=masks)
        assert samo.load_masks(tmp_path / format) == masks
    assert samo.load_masks(tmp_path / "dense" / "masks.safetensors") == masks
    checkpoint = save_run(tmp_path / "run", model, masks)
    (tmp_path / "run" / "run.json").write_text("{}")
    assert samo.load_masks(tmp_path / "run") == samo.load_masks(checkpoint) == masks
    with pytest.raises(MaskError, match=r"gone' does not exist; name a checkpoint, a run folder, "):
        samo.load_masks(tmp_path / "gone")


def test_a_folder_without_masks_has_none(folder: Path) -> None:
    assert open_masks(folder, open_model(folder)) is None
    with pytest.raises(MaskError, match=r"has no masks, only zeros .* samo\.Masks\.from_zeros\("):
        samo.load_masks(folder)
    with pytest.raises(CheckpointError, match=r"llama' has no tokenizer: none of tokenizer.json"):
        tokenizer_folder(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"not complete: '{gone.name}', which model.safe"):
        open_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no weights: neither model.safetensors nor"):
        open_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"in 'pytorch_model.bin' only, a pickle.*convert"):
        open_model(folder)


@pytest.mark.parametrize("listed", ["../x.safetensors", "x.bin", 3, None, ["x"], {}])
def test_an_index_names_files_of_the_folder_only(folder: Path, listed: object) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": listed}}))
    with pytest.raises(CheckpointError, match=r"index.json' is damaged: its weight_map names "):
        open_model(folder)


def test_a_file_that_transformers_would_read_instead_is_refused(folder: Path) -> None:
    first = sorted(folder.glob("model-*.safetensors"))[0]
    (folder / f"shard-00001-{first.name}").write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"parts of tensors \(shard-00001-model-00001-of"):
        open_model(folder)


def test_links_and_pipes_are_refused(folder: Path, tmp_path: Path) -> None:
    moved = (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(moved)
    for act in (open_model, tokenizer_folder, lambda path: open_masks(path, torch.nn.Linear(1, 1))):
        with pytest.raises(CheckpointError, match=r"config.json' is a link, a pipe.*cp -rL"):
            act(folder)
    (folder / "config.json").unlink()
    moved.rename(folder / "config.json")
    os.mkfifo(folder / "pipe")
    with pytest.raises(CheckpointError, match="pipe' is a link, a pipe or a device"):
        open_model(folder)
    (folder / "pipe").unlink()
    (folder / "circle").symlink_to("circle")
    with pytest.raises(CheckpointError, match="circle' is a link, a pipe or a device"):
        open_model(folder)


def test_adapters_and_quantized_models_are_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "../other"}')
    with pytest.raises(CheckpointError, match=r"has an adapter .adapter_config.json., for which"):
        open_model(folder)
    (folder / "adapter_config.json").unlink()
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match=r"is quantized .'fp8'., and samo prunes"):
        open_model(folder)


def test_links_of_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    before = logits(open_model(folder))
    folder.rename(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert torch.equal(logits(open_model(snapshot)), before)


def test_a_tensor_is_in_one_file_only(folder: Path) -> None:
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"cannot be read: '.*' is also in '{first.name}'"):
        open_model(folder)


def test_a_folder_needs_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match="package that is not installed: pip install transf"):
        open_model(folder)


def test_a_tensor_of_another_name_is_missing(tmp_path: Path) -> None:
    folder = exported(tmp_path, "dense")
    before = logits(open_model(folder))
    state = load_file(folder / "model.safetensors")
    state["extra"] = torch.zeros(3)  # which transformers only warns of
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(open_model(folder)), before)
    state["model.norm.wait"] = state.pop("model.norm.weight")
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"it lacks 1 tensors, such as 'model.norm.weight'"):
        open_model(folder)


def test_damaged_files_are_named(folder: Path) -> None:
    config, file = folder / "config.json", sorted(folder.glob("model-*.safetensors"))[0]
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"{file.name}' cannot be read: .*download the model"):
        open_model(folder)
    file.write_bytes(data)
    text = config.read_text()
    for wrong in ("[]", "{", '{"model_type": "llama", "num_hidden_layers": "many"}'):
        config.write_text(wrong)
        with pytest.raises(CheckpointError, match="cannot be read"):
            open_model(folder)
    config.write_text(text.replace('"llama"', '"lama"'))
    with pytest.raises(CheckpointError, match=r"cannot be read as a Hugging Face model: .*lama"):
        open_model(folder)
