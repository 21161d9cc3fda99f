"""``samo prune`` on folders of Hugging Face models: what is written, and what is refused."""

import json
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import samo
from samo.cli.prune import disk_copy
from samo.data.calibration import calibration_batches, example_batches
from samo.data.examples import open_examples
from samo.data.tokenizers import ByteTokenizer
from samo.errors import DataError
from samo.integrations.model_tokenizer import ModelTokenizer
from tests.data.trained_tokenizer import TEXT, VOCAB_SIZE, save_trained_tokenizer
from tests.integrations.tiny_lms import tiny_lm

transformers = pytest.importorskip("transformers")

FAMILIES: dict[str, Any] = dict.fromkeys(["gpt2", "llama", "qwen2", "gemma", "mixtral"])
FAMILIES["mistral"] = torch.bfloat16
CALIBRATED = "--calibration notes.txt --samples 6 --context 32"
WANDA, SPARSEGPT = (f"--sparsity 0.5 --method {m} {CALIBRATED}" for m in ("wanda", "sparsegpt"))


def save_model(folder: Path, family: str = "llama", **changes: Any) -> nn.Module:
    model: nn.Module = tiny_lm(family, vocab_size=VOCAB_SIZE + 8, **changes)
    model.to(FAMILIES[family])
    model.save_pretrained(folder)
    file = save_trained_tokenizer(folder) / "tokenizer.json"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture
def here(here: Path) -> Path:
    (here / "notes.txt").write_text(TEXT * 40)
    return here


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_a_folder_has_zeros_and_masks_and_reads_like_any_other(
    family: str, method: str, here: Path, type_in: Any
) -> None:
    model = save_model(here / "model", family)
    how = "" if method == "magnitude" else CALIBRATED
    shown = type_in(f"prune model --sparsity 0.75 --method {method} {how}")
    assert "To train it: samo finetune model-pruned --data FILE" in shown.out
    assert "%|" not in shown.err  # no bar of transformers
    assert transformers.utils.logging.is_progress_bar_enabled()
    again = transformers.AutoModelForCausalLM.from_pretrained("model-pruned")
    assert again.dtype == model.dtype
    masks = samo.Masks.load("model-pruned/masks.safetensors")
    assert list(masks) == sorted(samo.prunable(model))
    # Weights in bfloat16 may be 0 themselves after SparseGPT.
    zeros = samo.Masks.from_zeros(again)
    assert all((zeros[name] & mask) == zeros[name] for name, mask in masks.items())
    assert zeros == masks or (method, family) == ("sparsegpt", "mistral")
    for mask in masks.values():
        assert mask.kept == mask.numel - round(mask.numel * 0.75)
    for name, param in model.named_parameters():
        is_equal = torch.equal(again.get_parameter(name), param)
        assert is_equal == (name not in masks)
        if method != "sparsegpt" and name in masks:
            assert torch.equal(again.get_parameter(name), masks[name].zero_(param.detach().clone()))
    assert again.generation_config.eos_token_id == 2
    tokens = transformers.AutoTokenizer.from_pretrained("model-pruned")(TEXT)["input_ids"]
    assert again(torch.tensor([tokens])).logits.isfinite().all()


def test_the_masks_are_those_of_the_same_call_in_python(here: Path, type_in: Any) -> None:
    model = save_model(here / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    how = "--pattern 2:4 --out masks.safetensors --seed 3"
    type_in(f"prune model --method wanda {how} {CALIBRATED}")

    def encode(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)

    batches = calibration_batches(here / "notes.txt", encode, 6, 32, seed=3)
    expected = samo.prune(model, pattern="2:4", method="wanda", calibration=batches, seed=3)
    assert samo.Masks.load("masks.safetensors") == expected


def test_examples_calibrate_as_samo_finetune_reads_them(here: Path, type_in: Any) -> None:
    model = save_model(here / "model")
    rows = [{"prompt": f"{number} and", "completion": f" {number} more"} for number in range(40)]
    (here / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed = "prune model --method wanda --sparsity 0.5 --calibration asked.jsonl --context 32"
    type_in(f"{typed} --samples 4 --out masks.safetensors")
    data = open_examples(
        [here / "asked.jsonl"], tokenizer=ModelTokenizer("model"), context=32, cache=here / "data"
    )
    batches = example_batches(data, samples=4, context=32)
    assert all(0 < batch.shape[1] <= 32 for batch in batches)
    expected = samo.prune(model, 0.5, method="wanda", calibration=batches)
    assert samo.Masks.load("masks.safetensors") == expected
    told = type_in(f"{typed} --samples 1000", 1).err
    assert "samples of 32 tokens, and 1,000 are asked for; use more examples, or --sam" in told
    flags = told.rpartition(" or ")[2].strip()
    type_in(f"{typed} {flags} --out as-told.safetensors")


def test_patterns_scopes_and_rules_reach_the_masks(here: Path, type_in: Any) -> None:
    model = save_model(here / "model")

    def masks(flags: str) -> samo.Masks:
        Path("masks.safetensors").unlink(missing_ok=True)
        type_in(f"prune model {flags} --out masks.safetensors")
        return samo.Masks.load("masks.safetensors")

    keep = masks("--pattern 2:4")["model.layers.0.mlp.down_proj.weight"].to_bool()
    assert (keep.view(32, 16, 4).sum(2) == 2).all()
    found = masks("--scope erk --sparsity 0.8")
    assert found.kept == found.numel - round(found.numel * 0.8)
    assert len({round(mask.sparsity, 2) for mask in found.values()}) == 2
    rules = "--rules *.q_proj.weight 0.25 --skip *.k_proj.weight"
    found = masks(f"--sparsity 0.6 --scope owl {rules} {CALIBRATED}")
    assert not any("k_proj" in name for name in found)
    others = {n: m for n, m in found.items() if "q_proj" not in n}
    numel = sum(mask.numel for mask in others.values())
    assert sum(mask.kept for mask in others.values()) == numel - round(numel * 0.6)
    assert len(found) == len(samo.prunable(model)) - 2


def test_a_run_is_calibrated_with_its_own_tokenizer(here: Path, type_in: Any) -> None:
    flags = "--steps 2 --batch-size 2 --num-layers 1 --width 32 --num-heads 2"
    type_in(f"train notes.txt {flags} --context 32 --mode dense --out run")
    type_in(f"prune run --sparsity 0.5 --method wanda {CALIBRATED}")
    assert samo.Masks.load("masks.safetensors").sparsity == 0.5
    type_in(f"prune run --method sparsegpt {CALIBRATED} --out folder", 2)


# Bad input


def no_tokenizer(folder: Path) -> None:
    save_model(folder)
    for file in folder.glob("token*"):
        file.unlink()


def foreign_tokenizer(folder: Path) -> None:
    """Leave only a file that transformers reads as Gemma's own tokenizer, which it is not."""
    save_model(folder, "gemma")
    (folder / "tokenizer_config.json").unlink()


def no_config(folder: Path) -> None:
    save_model(folder)
    (folder / "config.json").write_text("{}")


def infinite(folder: Path) -> None:
    model = save_model(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e38
        model.model.layers[0].mlp.up_proj.weight.fill_(1e30)
    model.save_pretrained(folder)


def sparse(folder: Path) -> None:
    model = save_model(folder)
    samo.prune(model, 0.8).apply_(model)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("make", "flags", "code", "message"),
    [
        (save_model, "", 2, "sparsegpt: samo prune model --sparsity 0.5 --method wanda --cal"),
        (save_model, "--rules *.q_proj.weight 0.5", 2, "50-70 % is sensible for language models"),
        (save_model, "--method wanda", 2, "--method wanda needs text to calibrate on: --calib"),
        (save_model, "--scope owl", 2, "--scope owl needs text to calibrate on"),
        (save_model, "--calibration notes.txt", 2, "--calibration has no effect with --method mag"),
        (save_model, "--sparsity 0.9999", 2, ".weight'; prune less there with --rules model"),
        (save_model, f"{WANDA} --out notes.txt", 2, "'notes.txt' exists; choose another name w"),
        (save_model, f"{WANDA} --out no/folder/m", 2, "--out must be in an existing folder"),
        (save_model, "--sparsity 0.5 --device cuda", 2, "--device cuda needs a GPU"),
        (save_model, "--method zeros", 2, "less than 5 %; leave out --method zeros to prune it"),
        (save_model, "--pattern 2:4 --sparsity 0.9", 2, "'2:4' prunes 0.5 of the weights, which"),
        (
            save_model,
            f"{SPARSEGPT} --out m.safetensors",
            2,
            "so the masks in 'm.safetensors' would",
        ),
        (save_model, f"{WANDA} --scope global", 2, "compares weights within"),
        (save_model, f"{WANDA} --context 65", 2, "--context 65 is more than the model's 64 tokens"),
        (save_model, f"{WANDA} --samples 128", 1, "tokens, and 128 samples of 32 need 4,096; use"),
        (save_model, f"{WANDA} --calibration note.txt", 1, "does not exist (did you mean 'notes."),
        (no_config, "--sparsity 0.5", 1, "cannot be read as a Hugging Face model"),
        (no_tokenizer, WANDA, 1, "is there; --calibration needs the model's tokenizer"),
        (foreign_tokenizer, WANDA, 1, "cannot encode the text: Unk token `<unk>` not found"),
        (infinite, SPARSEGPT, 2, "layers.0.mlp.down_proj.weight' are NaN or infinite"),
        (sparse, "--sparsity 0.5", 2, "nonzero weights, and"),
        (sparse, WANDA, 2, "raise --sparsity above 0.8"),
        (sparse, SPARSEGPT, 2, "use --method zeros"),
    ],
)
def test_what_cannot_be_pruned_is_refused_and_nothing_is_written(
    make: Any, flags: str, code: int, message: str, here: Path, type_in: Any
) -> None:
    make(here / "model")
    before = sorted(here.iterdir())
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert message in type_in(f"prune model {flags}", code).err
    assert sorted(here.iterdir()) == before


def test_what_exists_is_never_overwritten(here: Path, type_in: Any) -> None:
    save_model(here / "model")
    shown = type_in("prune model --sparsity 0.5").out
    assert "Chosen by magnitude; --method wanda --calibration FILE usually" in shown
    before = {file: file.read_bytes() for file in (here / "model-pruned").iterdir()}
    assert "'model-pruned' exists" in type_in("prune model --sparsity 0.6", 2).err
    assert {file: file.read_bytes() for file in (here / "model-pruned").iterdir()} == before


def test_a_full_disk_is_told(here: Path, type_in: Any) -> None:
    save_model(here / "model")
    full = OSError(28, "No space left on device")
    with mock.patch("os.posix_fallocate", side_effect=full):
        shown = type_in("prune model --sparsity 0.5", 1).err
    assert "no room for a copy of the model in '.': No space left" in shown


# The parts


def test_samples_do_not_overlap_and_begin_as_a_text_does(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samo.data.calibration._PIECE", 100)  # several of the longer text
    tokenizer = ByteTokenizer()
    start = torch.tensor([300])

    def encode(text: str) -> torch.Tensor:
        return torch.cat([start, torch.from_numpy(tokenizer.encode(text).copy()).long()])

    (here / "digits.txt").write_text("".join(chr(33 + i) for i in range(90)))
    batches = calibration_batches(here / "digits.txt", encode, samples=8, context=11, seed=1)
    samples = torch.cat(batches)
    assert samples.shape == (8, 11)
    assert (samples[:, 0] == 300).all()
    assert (samples[:, 1:].diff(dim=1) == 1).all()
    firsts = sorted(samples[:, 1].tolist())
    assert len({*firsts}) == 8
    assert all((first - 33) % 10 == 0 for first in firsts)
    assert firsts != samples[:, 1].tolist()
    sizes = {len(batch) * 64 for batch in calibration_batches(here / "notes.txt", encode, 40, 64)}
    assert sizes <= {2048, 40 * 64 - 2048}
    whole = torch.cat(calibration_batches(here / "notes.txt", encode, 40, 65))[:, 1:]
    text = (here / "notes.txt").read_bytes()
    windows = {text[start : start + 64] for start in range(0, len(text), 64)}
    assert all(bytes(row) in windows for row in whole.tolist())
    with pytest.raises(DataError, match="a context of 1 tokens has no room for text"):
        calibration_batches(here / "digits.txt", encode, samples=8, context=1)


@pytest.mark.parametrize("num_tokens", [30, 90, 3600, 20_000])
@pytest.mark.parametrize("marks", [0, 1])
def test_too_short_a_text_is_refused_with_what_it_is_enough_for(
    num_tokens: int, marks: int, here: Path
) -> None:
    def encode(text: str) -> torch.Tensor:
        return torch.cat([torch.zeros(marks), torch.ones(len(text))]).long()

    (here / "short.txt").write_text("x" * num_tokens)
    with pytest.raises(DataError, match="tokens, and 128 samples of 2,048 need") as refused:
        calibration_batches(here / "short.txt", encode, 128, 2048)
    found = re.search(r"use more text, or --samples (\d+) --context (\d+)$", str(refused.value))
    if num_tokens < 32 - marks:
        assert found is None
        return
    assert found is not None
    samples, context = map(int, found.groups())
    rows = torch.cat(calibration_batches(here / "short.txt", encode, samples, context))
    assert rows.shape == (samples, context)
    assert samples * context >= num_tokens / 2


@pytest.mark.parametrize("shape", [(0, 3), (1,), (33, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_on_disk_is_equal_and_of_its_own(
    shape: tuple[int, ...], dtype: torch.dtype, here: Path
) -> None:
    tensor = torch.randn(shape).to(dtype)
    copy = disk_copy(tensor, here)
    assert copy.dtype == dtype
    assert torch.equal(copy, tensor)
    assert [file.name for file in here.iterdir()] == ["notes.txt"]
    copy += 1
    assert torch.equal(copy, tensor + 1)
    if math.prod(shape):
        mapped = Path("/proc/self/maps").read_text()
        assert f"{here}/#" in mapped or "(deleted)" in mapped
