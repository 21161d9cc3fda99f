"""The GPT of `samo train` as a GPT-2 of transformers, with its masks and a tokenizer of bytes."""

import json
from pathlib import Path
from typing import Any, Final

import torch

from samo.core.compress import dense_state_dict
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.models.gpt import GPT

_NAMES: Final = {
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp.0": "mlp.c_fc",
    "mlp.2": "mlp.c_proj",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "embed": "transformer.wte",
    "position": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


@torch.no_grad()
def to_gpt2(gpt: GPT, masks: Masks | None) -> tuple[Any, Masks | None]:
    """Return a GPT as a dense GPT-2, and its masks by the names and shapes there."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = gpt.config
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        activation_function="gelu_pytorch_tanh",
        tie_word_embeddings=shape.is_tied,
        bos_token_id=None,
        eos_token_id=None,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    state = {}
    for name, value in dense_state_dict(gpt).items():
        other, is_transposed = _renamed(name)
        state[other] = value.t() if is_transposed else value
    model = GPT2LMHeadModel(config).to(value.dtype).eval()
    model.load_state_dict(state)
    if masks is None:
        return model, None
    found = {}
    for name, mask in masks.items():
        other, is_transposed = _renamed(name)
        found[other] = Mask.from_bool(mask.to_bool().t()) if is_transposed else mask
    return model, Masks(found)


def _renamed(name: str) -> tuple[str, bool]:
    """Return the name of a parameter in a GPT-2, and whether it is transposed there."""
    path, _, kind = name.rpartition(".")
    if not path.startswith("blocks."):
        return f"{_NAMES[path]}.{kind}", False
    _, number, part = path.split(".", 2)
    # GPT-2's linear layers are Conv1D, whose weights are (in, out).
    is_transposed = kind == "weight" and not part.startswith("norm")
    return f"transformer.h.{number}.{_NAMES[part]}.{kind}", is_transposed


def write_byte_tokenizer(folder: Path, context: int) -> None:
    """Write a tokenizer.json whose tokens are the bytes of UTF-8, as `samo train` reads them."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    vocab = {letter: byte for byte, letter in sorted(bytes_to_unicode().items())}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {**level, "use_regex": False},
        "decoder": {**level, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
