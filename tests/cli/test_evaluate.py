"""``samo evaluate``: the loss that transformers computes, and that of the run that trained."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from samo.integrations.export import export
from samo.integrations.model_folders import open_masks, open_model
from samo.report.runs import read_run
from tests.cli.test_generate import language_model

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
    rows = [{"prompt": "To be, or", "completion": f" not to be{'.' * n}"} for n in range(5)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed, apart = (
        json.loads(type_in(f"evaluate {llama} --data rows.jsonl --json {flags}").out)
        for flags in ("", "--no-pack")
    )
    assert packed["loss"] == pytest.approx(apart["loss"], rel=1e-5)
    assert packed["tokens"] == apart["tokens"]
    assert (packed["sequences"], apart["sequences"]) < (5, 5)
    type_in(f"evaluate {llama} --data rows.jsonl --dtype bf16")


def test_people_read_a_table(llama: Path, here: Path, type_in: Any) -> None:
    Path("notes.txt").write_text(TEXT * 9)
    shown = type_in(f"evaluate {llama} --data notes.txt --context 32 --max-batches 1").out
    names = [line.split()[0] for line in shown.splitlines()]
    assert names == ["loss", "perplexity", "tokens", "tokens/s"]
    assert "134 in 5 sequences of 32" in shown


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        ("", 2, "name the data: --data FILE"),
        ("--data notes.txt --context 65", 2, "--context 65 is longer than the 64 tokens"),
        ("--data none.txt", 1, "none.txt"),
        ("--data one.txt", 1, "too few for a sequence"),
    ],
)
def test_what_cannot_be_evaluated_is_told(
    llama: Path, here: Path, type_in: Any, words: str, code: int, complaint: str
) -> None:
    Path("notes.txt").write_text(TEXT * 9)
    Path("one.txt").write_text("To")
    assert complaint in type_in(f"evaluate {llama} {words}", code).err


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
