"""Train tiny models of many Hugging Face architectures, compressed and masked dense, and print how far apart.

    python -m benchmarks.sweep_hf [--steps 5]

fp64 on a CPU with torch's AdamW, every matrix pruned by 80 %. The last columns are how far
the weight that moved most went, and the largest difference of any weight between the two runs.
"""

import argparse
import copy
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import samo

TEXT = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "experts_implementation": "eager",
}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 4,
    "experts_implementation": "eager",
}
T5 = {
    "vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip

CAUSAL: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": {},
    "Gemma3": {"name": ("Gemma3TextConfig", "Gemma3ForCausalLM")},
    "Qwen2Moe": EXPERTS,
    "Qwen3Moe": EXPERTS,
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "Bloom": {"n_layer": 2, "n_head": 2},
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "Phi3": {},
    "GPTNeoX": {},
    "Falcon": {"new_decoder_architecture": False, "multi_query": True, "head_dim": ...},
    "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "expand": 2, "n_groups": 2},
}
"""Language models and what their tiny configurations need beside `TEXT`; ... leaves a setting out."""


def causal(name: str, changes: dict[str, Any]) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    """Return a builder of one language model and a batch."""

    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        import transformers

        config_name, model_name = changes.get("name", (f"{name}Config", f"{name}ForCausalLM"))
        settings = {**TEXT, **changes}
        settings = {
            key: value for key, value in settings.items() if key != "name" and value is not ...
        }
        config = getattr(transformers, config_name)(**settings)
        ids = torch.randint(3, 48, (2, 9))
        return getattr(transformers, model_name)(config), {"input_ids": ids, "labels": ids}

    return build


def t5(**changes: Any) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    """Return a builder of an encoder with a decoder."""

    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        import transformers

        ids = torch.randint(3, 48, (2, 9))
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, **changes))
        return model, {"input_ids": ids, "labels": ids[:, :5].contiguous()}

    return build


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return BERT with its masked-language head."""
    import transformers

    settings = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ids = torch.randint(3, 48, (2, 9))
    return transformers.BertForMaskedLM(transformers.BertConfig(**settings)), {
        "input_ids": ids,
        "labels": ids,
    }


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a vision transformer with a classifier."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64),
        "labels": torch.tensor([0, 2]),
    }


def whisper() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return an encoder of sound with a decoder of text."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=48, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8,
        max_source_positions=8, max_target_positions=12, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, dropout=0.0,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 16, dtype=torch.float64),
        "labels": torch.randint(3, 48, (2, 6)),
    }


ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    **{name: causal(name, changes) for name, changes in CAUSAL.items()},
    "T5 tied": t5(tie_word_embeddings=True),
    "T5 gated": t5(tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
    "BERT": bert,
    "ViT": vit,
    "Whisper": whisper,
}


def difference(name: str, steps: int) -> tuple[float, float, int]:
    """Return how far a compressed run is from the masked dense one, how far both went, and the tensors pruned."""
    torch.manual_seed(0)
    model, batch = ARCHITECTURES[name]()
    model = model.double().train()
    keep = {
        name: torch.rand(param.shape) < 0.2
        for name, param in model.named_parameters()
        if param.dim() >= 2
    }
    masks = samo.Masks({name: samo.Mask.from_bool(kept) for name, kept in keep.items()})
    dense = copy.deepcopy(model)
    masks.apply_(dense)
    for weight, param in dense.named_parameters():
        if weight in keep and param.requires_grad:
            param.register_hook(lambda grad, kept=keep[weight]: grad.where(kept, 0))
    before = copy.deepcopy(dense.state_dict())
    samo.compress_(model, masks)
    for net in (model, dense):
        opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for _ in range(steps):
            opt.zero_grad()
            net(**batch).loss.backward()
            opt.step()
    ours, theirs = samo.dense_state_dict(model), dense.state_dict()
    return largest(ours, theirs), largest(before, theirs), len(masks)


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two state dicts; NaN if there is one."""
    return float(torch.stack([(one[key] - other[key]).abs().max() for key in other]).max())


def main() -> None:
    """Print one row for each architecture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # of transformers, about kernels that are not installed
    print(
        f"{'architecture':<14}{'pruned tensors':>15}{'seconds':>9}{'moved':>10}{'difference':>12}"
    )
    for name in ARCHITECTURES:
        start = time.perf_counter()
        try:
            worst, moved, pruned = difference(name, steps)
        except Exception as error:
            print(f"{name:<14}  {type(error).__name__}: {error}"[:160])
            continue
        seconds = time.perf_counter() - start
        print(f"{name:<14}{pruned:>15}{seconds:>9.1f}{moved:>10.1e}{worst:>12.1e}", flush=True)


if __name__ == "__main__":
    main()
