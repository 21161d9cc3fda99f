"""Models, batches and the one-process reference that pipelines are compared with."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samo
from samo.models.gpt import GPT, GPTConfig


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    if logits_BTV.dtype.itemsize < 4:
        logits_BTV = logits_BTV.float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def tiny_gpt(**settings: Any) -> GPT:
    torch.manual_seed(1)
    config = {"num_layers": 3, "width": 16, "num_heads": 2, "vocab_size": 32, "context": 8}
    return GPT(GPTConfig(**(config | settings)))


def tokens(rows: int = 8, seed: int = 5) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    batch_BT = torch.randint(0, 32, (rows, 9), generator=draw)
    return batch_BT[:, :-1], batch_BT[:, 1:]


FAMILIES = {
    "gpt2": "GPT2", "gpt_neox": "GPTNeoX", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2",
    "qwen3": "Qwen3", "gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3", "phi3": "Phi3",
}  # fmt: skip
"""Of Hugging Face, that a pipeline takes."""


def tiny_hf(family: str, *, is_tied: bool = False, dropout: float = 0.0) -> nn.Module:
    import transformers

    torch.manual_seed(2)
    common = {"vocab_size": 32, "tie_word_embeddings": is_tied, "pad_token_id": 0}
    if family == "gpt2":
        sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": 8}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**sizes, **drops, **ends, **common)
        )
    sizes = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 8, "head_dim": 8}
    if family != "gpt_neox":
        sizes["num_key_value_heads"] = 1
    if family in ("mistral", "gemma2", "gemma3"):
        sizes["sliding_window"] = 3  # in some layers
    name = FAMILIES[family]
    config = f"{name}TextConfig" if family == "gemma3" else f"{name}Config"
    settings = getattr(transformers, config)(**sizes, **common, attention_dropout=dropout)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(settings)
    return model


def optimizer(name: str, module: nn.Module, *, is_compressed: bool) -> torch.optim.Optimizer:
    params = list(module.parameters())
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if is_compressed:
        return samo.AdamW(params, lr=1e-2)
    return torch.optim.AdamW(params, lr=1e-2, foreach=False)


def compress(module: nn.Module, whole: nn.Module, sparsity: float = 0.9, **settings: Any) -> None:
    """Compress a part of a model with the masks of the whole."""
    masks = samo.prune(whole, sparsity)
    names = dict(module.named_parameters(remove_duplicate=False))
    mine = samo.Masks({name: masks[name] for name in masks if name in names})
    samo.compress_(module, mine, kernels="reference", **settings)


def pipeline_of(
    whole: nn.Module, mesh: Any, micro_batches: int, *, is_compressed: bool, **settings: Any
) -> samo.Pipeline:
    """Return a copy of a model as a pipeline, compressed with the masks of the whole or not."""
    layers = copy.deepcopy(whole)
    settings = {"timeout_s": 20} | settings
    pipeline = samo.Pipeline(layers, next_token_loss, mesh, micro_batches, **settings)
    if is_compressed:
        compress(pipeline.module, whole)
    return pipeline


def accumulate(
    model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, micro_batches: int
) -> Tensor:
    """Run forward and backward of each micro-batch in one process; return the loss."""
    pieces = list(zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches)))
    counts = [int((target != -100).sum()) for _, target in pieces]
    total: Tensor | None = None
    for (part, target), number in zip(pieces, counts):
        loss = next_token_loss(model(part), target) * (number / sum(counts))
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def reference(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    micro_batches: int,
    opt: torch.optim.Optimizer,
) -> list[Tensor]:
    """Train in one process; return the losses."""
    losses = []
    for x, y in batches:
        opt.zero_grad()
        losses.append(accumulate(model, x, y, micro_batches))
        opt.step()
    return losses
