"""samo export: every kind of folder in, every format out."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import samo
from samo.integrations.export import Format
from samo.integrations.model_folders import open_masks, open_model
from tests.integrations.cases import load, logits, names, pruned, trained


def test_a_folder_goes_through_all_formats_and_back(here: Path, type_in: Any) -> None:
    model, masks = pruned("Llama")
    samo.export(model, here / "model", masks=masks)
    (here / "model" / "tokenizer.json").write_text("{}")
    (here / "model" / "chat_template.jinja").write_text("{{ messages }}")
    for first in get_args(Format):
        shown = type_in(f"export model --format {first}").out
        assert f"written to model-{first}" in shown
        assert re.search(r"dtype +float32", shown)
        assert "sparsity   90 % of 14 tensors" in shown
        back = f"compressed-tensors up to 0.14; convert it back with: samo export model-{first} "
        assert (back in shown) == (first == "bitmask")
        for second in get_args(Format):
            out = f"{first}-{second}"
            type_in(f"export model-{first} --format {second} --out {out}")
            again = open_model(out)
            assert torch.equal(logits(again), logits(model))
            assert open_masks(out, again) == masks
            assert names(here / out) >= {"tokenizer.json", "chat_template.jinja"}
    type_in("export model --dtype bf16 --out narrow")
    assert load(here / "narrow").dtype == torch.bfloat16


@pytest.mark.parametrize("format", get_args(Format))
def test_a_run_of_finetune_is_exported(format: Format, here: Path, type_in: Any) -> None:
    model = trained("Qwen2")
    model.config.save_pretrained("run/hugging-face")
    Path("run/hugging-face/tokenizer.json").write_text("{}")
    Path("run/run.json").write_text("{}")
    samo.save("run/checkpoints/last", model)
    type_in(f"export run --format {format}")
    again = open_model(f"run-{format}")
    assert torch.equal(logits(again), logits(model))
    assert again.dtype == torch.bfloat16  # in which the run computes
    assert open_masks(f"run-{format}", again) == samo.masks(model)
    assert "tokenizer.json" in names(here / f"run-{format}")
    shutil.move(f"run-{format}", "run/model")
    type_in(f"export run/model --format {format}")
    assert torch.equal(logits(open_model(f"run-{format}")), logits(model))  # named after the run


def test_a_run_of_train_becomes_a_gpt2(run: Path, here: Path, type_in: Any) -> None:
    from transformers import AutoTokenizer

    gpt = open_model(run)
    tokens = torch.arange(32)[None] * 7 % 256
    for format in get_args(Format):
        type_in(f"export run --format {format}")
        again = open_model(f"run-{format}").eval()
        with torch.no_grad():
            assert torch.equal(again(tokens).logits, gpt(tokens))
        assert open_masks(f"run-{format}", again).kept == open_masks(run, gpt).kept
    assert json.loads((here / "run-dense" / "config.json").read_text())["model_type"] == "gpt2"
    tokenizer = AutoTokenizer.from_pretrained(here / "run-dense")
    text = "Füchse\n\tjump  <|endoftext|> 狐"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    type_in("export run/checkpoints/best --out best")


@pytest.mark.parametrize("format", ["dense", "compressed"])
def test_transformers_has_no_doubts_about_the_tokens_of_a_gpt2(
    run: Path, here: Path, format: Format, type_in: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    type_in(f"export run --format {format} --out first")
    type_in("export first --out again")
    caplog.clear()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model = AutoModelForCausalLM.from_pretrained("again")
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []
    for name in ("bos_token_id", "eos_token_id"):
        assert json.loads(Path("first/config.json").read_text())[name] is None
        assert getattr(model.config, name) is getattr(model.generation_config, name) is None


def test_a_dense_run_is_exported(run: Path, here: Path, type_in: Any) -> None:
    gpt = open_model(run)
    extra = samo.load(run / "checkpoints" / "last", gpt)
    shutil.rmtree(run / "checkpoints")
    samo.save(run / "checkpoints" / "last", gpt, extra={"model": extra["model"]})
    assert "sparsity" not in type_in("export run --out dense").out
    with torch.no_grad():
        tokens = torch.arange(32)[None]
        assert torch.equal(load(here / "dense")(tokens).logits, gpt(tokens))


def test_what_cannot_be_exported_is_refused(here: Path, type_in: Any) -> None:
    from tests.integrations.cases import causal_lm

    samo.export(causal_lm("Llama"), "model")
    for typed, code, message in (
        ("export nothing", 1, "'nothing' does not exist; name a checkpoint, a run folder"),
        ("export model --out model", 1, "'model' exists; choose another folder, or remove it"),
        (
            "export model --format compressed",
            2,
            "cannot be written as compressed: the model is not pruned: the sparsest of 15 tensors "
            "has 0 % zeros, less than 5 %; prune it with: samo prune model",
        ),
    ):
        assert message in type_in(typed, code).err
    assert names(here) == {"model"}
