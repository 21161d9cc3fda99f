"""Hugging Face folders and examples, and the public ways to open them, for `mutations`."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch

import samo
from benchmarks.faults.cases import Case, Stopper, command, digest, open_run
from samo.integrations.model_folders import open_compressed, open_masks, open_model
from samo.train.finetune_config import (
    FinetuneConfig,
    FinetuneData,
    FinetuneModel,
    FinetuneRun,
)
from samo.train.trainer import train

TEMPLATE: Final = (
    "{% for m in messages %}<u>{{ m.role }} {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<u>assistant {% endif %}"
)
ROWS: Final[list[dict[str, Any]]] = [
    {"text": "the model keeps one weight of ten"},
    {"prompt": "one weight of", "completion": " ten"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
]


def logits(model: Any) -> str:
    """Return a hash of what a model says to a few tokens, and of its weights."""
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        return digest(model.eval()(tokens).logits, dict(model.named_parameters()))


def open_dense(path: Path) -> str:
    model = open_model(path)
    masks = open_masks(path, model)
    return digest(logits(model), None if masks is None else masks.fingerprint())


def generate(path: Path) -> str:
    words = ("--prompt", "one weight", "--max-tokens", "3", "--temperature", "0")
    return command("generate", str(path), *words)


def write_again(path: Path) -> str:
    command("export", str(path), "--out", str(path.parent / "again"))
    return open_dense(path.parent / "again")


def prune_again(path: Path) -> str:
    words = ("--sparsity", "0.8", "--calibration", str(path / "notes.txt"), "--method", "wanda")
    more = ("--samples", "2", "--context", "8", "--out", str(path.parent / "again"))
    command("prune", str(path), *words, *more)
    return open_dense(path.parent / "again")


def finetune(path: Path) -> str:
    return digest(train(settings(path, steps=1), path.parent / "run").valid_loss)


def settings(path: Path, steps: int) -> FinetuneConfig:
    return FinetuneConfig(
        data=FinetuneData(data=(path / "notes.jsonl",), valid_fraction=0.2),
        model=FinetuneModel(model=path, context=16),
        run=FinetuneRun(steps=steps, batch_size=2, sample_tokens=0, log_every=1),
    )


def build(home: Path) -> None:
    """Write a folder of each layout, with a tokenizer and examples."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    text = "\n".join(json.dumps(row) for row in ROWS) + "\n"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<u>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    whole.chat_template = TEMPLATE
    whole.save_pretrained(home / "tokenizer")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 280,
    }
    config = LlamaConfig(**sizes, num_hidden_layers=2, max_position_embeddings=64)
    model = LlamaForCausalLM(config)
    masks = samo.prune(model, 0.6)
    for format in ("dense", "compressed", "bitmask"):
        for size in ("5GB", "20KB") if format == "dense" else ("5GB",):
            name = f"hf-{format}" + "-sharded" * (size != "5GB")
            samo.export(
                copy.deepcopy(model),
                home / name,
                format=format,
                masks=masks,
                source=home / "tokenizer",
                max_shard_size=size,
            )
            (home / name / "notes.jsonl").write_text(text * 8)
            (home / name / "notes.txt").write_text(text * 8)
    (home / "hf-run").mkdir()
    train(settings(home / "hf-dense", steps=6), home / "hf-run" / "run", listeners=[Stopper()])
    shutil.rmtree(home / "hf-run" / "run" / "tensorboard", ignore_errors=True)


def of_compressed(path: Path) -> str:
    return logits(open_compressed(path, weights="streamed"))


WEIGHTS: Final = "[cm][oa]*"  # config, model and masks
TOKENIZER: Final = "*token*.json"
FOLDERS: Final = {
    "HF dense": Case("hf-dense", open_dense, WEIGHTS),
    "HF sharded": Case("hf-dense-sharded", open_dense, WEIGHTS),
    "HF compressed": Case("hf-compressed", of_compressed, WEIGHTS),
    "HF bitmask": Case("hf-bitmask", open_dense, WEIGHTS),
    "HF generate": Case("hf-compressed", generate, "*.json"),
    "HF inspect": Case("hf-bitmask", lambda path: command("inspect", str(path)), WEIGHTS),
    "HF export": Case("hf-compressed", write_again, WEIGHTS),
    "HF prune": Case("hf-dense", prune_again, "*.json"),
    "HF finetune": Case("hf-compressed", finetune, WEIGHTS),
    "HF resume": Case("hf-run", open_run, "run/hugging-face/*"),
    "HF generate, run": Case("hf-run", lambda path: generate(path / "run"), "run/hugging-face/*"),
    "HF template": Case("hf-dense", finetune, "*.jinja"),
    "HF tokenizer": Case("hf-dense", finetune, TOKENIZER),
    "HF examples": Case("hf-dense", finetune, "notes.jsonl"),
}
