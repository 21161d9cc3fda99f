"""``samo evaluate``: the loss that transformers computes, and that of the run that trained."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

import samo
from samo.data.rows import Completion
from samo.integrations.export import export
from samo.integrations.model_folders import open_masks, open_model
from samo.integrations.model_tokenizer import ModelTokenizer
from samo.report.runs import read_run
from tests.cli.test_generate import language_model
from tests.data.trained_tokenizer import VOCAB_SIZE, save_trained_tokenizer

TEXT = "To be, or not to be: that is the question.\n"
RUN = "--steps 2 --batch-size 2 --context 16 --eval-every 2 --eval-batches 3 --device cpu"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return language_model(tmp_path_factory.mktemp("llama"))


def loss_of(folder: Path, text: str, context: int) -> tuple[float, int]:
    """Return the loss of a text in windows, and its tokens, with plain transformers."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    total, model = 0.0, open_model(folder, dtype=torch.float32).eval()
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context + 1]
        with torch.no_grad():
            logits = model(input_ids=window[None, :-1]).logits[0]
        total += float(functional.cross_entropy(logits, window[1:], reduction="sum"))
    return total / (len(tokens) - 1), len(tokens) - 1


@pytest.mark.parametrize("format", ["dense", "compressed"])
@pytest.mark.parametrize("weights", ["dense", "streamed"])
def test_the_loss_is_that_of_transformers(
    llama: Path, format: Any, weights: str, here: Path, type_in: Any
) -> None:
    Path("notes.txt").write_text(TEXT * 9)
    model = open_model(llama)
    masks = open_masks(llama, model)
    folder = export(model, here / "model", format=format, source=llama, masks=masks)
    flags = f"--context 16 --batch-size 3 --weights {weights} --device cpu --json"
    found = json.loads(type_in(f"evaluate {folder} --data notes.txt {flags}").out)
    expected, tokens = loss_of(llama, TEXT * 9, 16)
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert (found["tokens"], found["sequences"]) == (tokens, -(-tokens // 16))
    assert (found["context"], found["device"], found["dtype"]) == (16, "cpu", "float32")


def test_the_loss_is_that_of_the_run_that_trained(llama: Path, here: Path, type_in: Any) -> None:
    Path("notes.txt").write_text(TEXT * 60)
    Path("valid.txt").write_text(TEXT.upper() * 9)
    type_in(f"finetune {llama} --data notes.txt --valid valid.txt --out tuned {RUN}")
    type_in(f"train notes.txt --valid valid.txt --out gpt --shape tiny --dense-steps 1 {RUN}")
    for run, models in (("tuned", ("tuned", "tuned/model")), ("gpt", ("gpt",))):
        last = read_run(Path(run)).last_eval
        assert last is not None
        for model in models:
            flags = "--context 16 --batch-size 2 --max-batches 3 --device cpu --json"
            shown = type_in(f"evaluate {model} --data valid.txt {flags}").out
            assert json.loads(shown)["loss"] == pytest.approx(last.valid_loss, rel=1e-6), model


def test_of_completions_the_completions_count(llama: Path, here: Path, type_in: Any) -> None:
    prompt, completion = "To be, or", " not to be"
    rows = [{"prompt": prompt, "completion": completion}] * 5
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = ModelTokenizer(llama)
    (example,) = tokenizer.encode_examples([("row 1", Completion(prompt, completion))])
    tokens = torch.from_numpy(np.maximum(example, ~example).astype(np.int64))
    with torch.no_grad():
        logits = open_model(llama, dtype=torch.float32).eval()(input_ids=tokens[None]).logits[0]
    losses = functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
    learned = torch.from_numpy(example[1:] >= 0)
    assert int(learned.sum()) == len(tokens) - len(tokenizer.encode(prompt)) == 3
    packed, apart = (
        json.loads(type_in(f"evaluate {llama} --data rows.jsonl --json {flags}").out)
        for flags in ("", "--no-pack")
    )
    assert packed["loss"] == pytest.approx(apart["loss"], rel=1e-5)
    assert packed["loss"] == pytest.approx(float(losses[learned].mean()), rel=1e-5)
    assert packed["tokens"] == apart["tokens"] == 5 * int(learned.sum())
    assert packed["sequences"] < apart["sequences"] == 5
    type_in(f"evaluate {llama} --data rows.jsonl --dtype bf16")


def test_people_read_a_table(llama: Path, here: Path, type_in: Any) -> None:
    Path("notes.txt").write_text(TEXT * 9)
    flags = "--context 32 --batch-size 2 --max-batches 1"
    shown = type_in(f"evaluate {llama} --data notes.txt {flags}").out
    names = [line.split()[0] for line in shown.splitlines()]
    assert names == ["model", "data", "loss", "perplexity", "tokens", "tokens/s"]
    assert "64 predicted, in 2 sequences of 32" in shown
    Path("short.txt").write_text(TEXT)
    assert "in 1 sequence of " in type_in(f"evaluate {llama} --data short.txt").out


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        ("", 2, "name the data: --data FILE"),
        ("--data notes.txt --context 65", 2, "--context 65 is longer than the 64 tokens"),
        ("--data none.txt", 1, "none.txt"),
        ("--data one.txt", 1, "1 tokens are too few for a sequence of 1 and the token after it"),
        ("notes.txt", 2, "'notes.txt' follows the model; name data with --data: samo evaluate"),
        ("--data notes.txt --data one.txt", 2, "--data is given twice, and only the last would"),
    ],
)
def test_what_cannot_be_evaluated_is_told(
    llama: Path, here: Path, type_in: Any, words: str, code: int, complaint: str
) -> None:
    Path("notes.txt").write_text(TEXT * 9)
    Path("one.txt").write_text("To")
    assert complaint in type_in(f"evaluate {llama} {words}", code).err


def bart(folder: Path) -> Path:
    """Write a model that computes a mean loss, whatever it is asked for, and has dropout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2}
    sizes |= {"decoder_ffn_dim": 64, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
    model = transformers.BartForCausalLM(transformers.BartConfig(**sizes, dropout=0.5))
    masks = samo.prune(model, 0.5)
    masks.apply_(model)
    model.save_pretrained(folder)
    masks.save(folder / "masks.safetensors")
    save_trained_tokenizer(folder)
    return folder


def test_the_loss_is_that_of_the_predictions_whatever_the_model_computes(
    here: Path, type_in: Any
) -> None:
    folder = bart(here / "bart")
    Path("notes.txt").write_text(TEXT * 9)
    shown = type_in(f"evaluate {folder} --data notes.txt --context 16 --device cpu --json")
    expected, _ = loss_of(folder, TEXT * 9, 16)
    assert json.loads(shown.out)["loss"] == pytest.approx(expected, rel=1e-5)
    shown = type_in(f"finetune {folder} --data notes.txt --out run {RUN}", 2).err
    assert "computes its loss in a way of its own" in shown


def test_packed_examples_that_would_see_each_other_are_refused(here: Path, type_in: Any) -> None:
    folder = language_model(here / "opt", "OPT")
    Path("rows.jsonl").write_text('{"text": "To be"}\n')
    assert "add --no-pack" in type_in(f"evaluate {folder} --data rows.jsonl", 2).err
    type_in(f"evaluate {folder} --data rows.jsonl --no-pack")


def test_json_is_all_there_is_on_stdout(
    llama: Path, here: Path, type_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samo.cli.console._SECONDS_BETWEEN_LINES", 0.0)
    Path("notes.txt").write_text(TEXT * 9)
    shown = type_in(f"evaluate {llama} --data notes.txt --batch-size 1 --context 16 --json")
    json.loads(shown.out)
    assert "batch 3/9" in shown.err


def test_a_closed_stderr_does_not_take_the_result(llama: Path, here: Path) -> None:
    Path("notes.txt").write_text(TEXT * 9)
    words = ["evaluate", str(llama), "--data", "notes.txt", "--batch-size", "1", "--json"]
    code = "import sys, samo.cli.console as c; c._SECONDS_BETWEEN_LINES = 0.0\n"
    code += "from samo.cli.main import main; sys.exit(main(sys.argv[1:]))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=write
    )
    os.close(write)
    assert json.loads(done.stdout)["tokens"] > 0


def test_a_model_that_predicts_nothing_fails(llama: Path, here: Path, type_in: Any) -> None:
    shutil.copytree(llama, "broken")
    state = load_file("broken/model.safetensors")
    next(value for value in state.values() if value.dim() == 1).fill_(float("nan"))
    save_file(state, "broken/model.safetensors", metadata={"format": "pt"})
    Path("notes.txt").write_text(TEXT * 9)
    shown = type_in("evaluate broken --data notes.txt --json", 1)
    assert "has a loss of nan on this data" in shown.err
    assert not shown.out


def test_what_evaluates_in_other_ways_is_refused(
    llama: Path, here: Path, type_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("notes.txt").write_text(TEXT * 60)
    type_in(f"train notes.txt --out gpt --shape tiny --dense-steps 1 {RUN}")
    Path("rows.jsonl").write_text('{"text": "To be"}\n')
    assert "no examples" in type_in("evaluate gpt --data rows.jsonl", 2).err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one process" in type_in(f"evaluate {llama} --data notes.txt", 2).err


def test_what_does_not_fit_says_what_to_change(
    llama: Path, here: Path, type_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("notes.txt").write_text(TEXT * 9)

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("9 GB")

    monkeypatch.setattr("samo.cli.evaluate.validation_batches", fail)
    shown = type_in(f"evaluate {llama} --data notes.txt --device cpu", 1).err
    assert "out of memory" in shown
    assert "smaller --batch-size or --context" in shown
