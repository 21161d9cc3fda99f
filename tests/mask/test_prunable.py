"""Which parameters are pruned by default: the matrices of real architectures, and not the rest."""

from typing import Any

import pytest
import torch
from torch import nn

from samo.mask.prunable import matching, prunable

transformers = pytest.importorskip("transformers")


def linears(prefix: str, *names: str) -> list[str]:
    return [f"{prefix}.{name}.weight" for name in names]


LLAMA_SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ATTENTION = linears("model.layers.0.self_attn", "q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "own head"])
def test_gpt2_prunes_its_conv1d_matrices_and_no_table(tied: bool) -> None:
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=64,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
    )
    expected = [
        f"transformer.h.{layer}.{name}.weight"
        for layer in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert prunable(transformers.GPT2LMHeadModel(config)) == expected


@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "own head"])
def test_llama_prunes_gate_proj_but_no_head(tied: bool) -> None:
    config = transformers.LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=tied)
    mlp = linears("model.layers.0.mlp", "gate_proj", "up_proj", "down_proj")
    assert prunable(transformers.LlamaForCausalLM(config)) == ATTENTION + mlp


def test_mixtral_prunes_stacked_experts_but_no_router() -> None:
    config = transformers.MixtralConfig(**LLAMA_SIZES, num_local_experts=4)
    experts = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert prunable(transformers.MixtralForCausalLM(config)) == ATTENTION + experts


def test_gpt_oss_prunes_no_biases_of_experts() -> None:
    config = transformers.GptOssConfig(**LLAMA_SIZES, num_local_experts=4, head_dim=8)
    names = prunable(transformers.GptOssForCausalLM(config))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert not [name for name in names if "bias" in name or "router" in name]


def test_the_head_of_a_hugging_face_model_is_known_whatever_its_name() -> None:
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    names = prunable(transformers.BertForMaskedLM(config))
    assert "cls.predictions.decoder.weight" not in names
    assert "bert.encoder.layer.0.output.dense.weight" in names


def test_a_wrapped_hugging_face_model_keeps_its_head() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_SIZES))
    names = prunable(nn.ModuleDict({"inner": model}))
    assert names == [f"inner.{name}" for name in prunable(model)]


class ResNet(nn.Module):
    """As torchvision names it: stem, blocks with a downsampling path, head in `fc`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(
            nn.ModuleDict(
                {
                    "conv1": nn.Conv2d(8, 16, 3),
                    "bn1": nn.BatchNorm2d(16),
                    "downsample": nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16)),
                    "fc": nn.Linear(16, 16),
                }
            )
        )
        self.fc = nn.Linear(16, 10)


def test_a_resnet_prunes_its_convolutions_but_not_the_root_fc() -> None:
    block = linears("layer1.0", "conv1", "downsample.0", "fc")
    assert prunable(ResNet()) == ["conv1.weight", *block]


@pytest.mark.parametrize(
    "path",
    [
        *("head", "heads", "classifier", "score", "lm_head", "output", "classifier.dense"),
        *("moe.gate", "moe.router", "moe.expert_router", "moe.shared_expert_gate"),
    ],
)
def test_heads_and_routers_are_not_pruned(path: str) -> None:
    layer: Any = nn.Linear(4, 4)
    for name in reversed(path.split(".")):
        layer = nn.ModuleDict({name: layer})
    assert prunable(nn.ModuleDict({"body": nn.Linear(4, 4), **layer})) == ["body.weight"]


def test_attention_prunes_its_matrices_but_no_bias() -> None:
    assert prunable(nn.MultiheadAttention(8, 2)) == ["in_proj_weight", "out_proj.weight"]
    attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True)
    expected = [*(f"{letter}_proj_weight" for letter in "qkv"), "out_proj.weight"]
    assert prunable(attention) == expected


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 4),
        nn.Conv1d(2, 2, 3),
        nn.Conv2d(2, 2, 3),
        nn.Conv3d(2, 2, 3),
        nn.ConvTranspose1d(2, 2, 3),
        nn.ConvTranspose2d(2, 2, 3),
        nn.ConvTranspose3d(2, 2, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_on_its_own_prunes_its_weight_but_no_bias(layer: nn.Module) -> None:
    assert prunable(layer) == ["weight"]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Embedding(4, 4),
        nn.EmbeddingBag(4, 4),
        nn.LayerNorm(4),
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.PReLU(4),
        nn.Identity(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_that_multiplies_no_matrix_has_nothing_to_prune(layer: nn.Module) -> None:
    assert prunable(nn.ModuleDict({"layer": layer})) == []


class FusedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 8, 6))
        self.w1_bias = nn.Parameter(torch.randn(4, 1, 6))
        self.scale = nn.Parameter(torch.randn(4, 8))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w2 = nn.Parameter(torch.randn(4, 6, 8))


def test_stacked_experts_are_told_by_class_or_place_and_must_have_three_dims() -> None:
    model = nn.ModuleDict({"ffn": FusedExperts(), "experts": Stacked(), "other": Stacked()})
    assert prunable(model) == ["ffn.w1", "experts.w2"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("body", "other", ["body.weight"]),
        ("body", "head", []),
        ("embed", "body", []),
    ],
)
def test_tied_matrices_are_named_once_or_exempt(
    first: str, second: str, expected: list[str]
) -> None:
    layer = nn.Embedding(4, 4) if first == "embed" else nn.Linear(4, 4)
    model = nn.ModuleDict({first: layer, second: nn.Linear(4, 4)})
    model[second].weight = model[first].weight
    assert prunable(model) == expected


NAMES = dict.fromkeys(["layers.0.mlp.weight", "layers.1.mlp.weight", "layers.1.attn.weight"])


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["layers.1.*"], {"layers.1.mlp.weight", "layers.1.attn.weight"}),
        (["*.mlp.*", "layers.1.attn.weight"], set(NAMES)),
        (["layers.[0-9].attn.weight"], {"layers.1.attn.weight"}),
        ("*.attn.weight", {"layers.1.attn.weight"}),
        ([], set()),
    ],
    ids=["folder", "two patterns", "brackets", "one string", "none"],
)
def test_patterns_match_like_a_shells(patterns: list[str] | str, expected: set[str]) -> None:
    assert matching(patterns, NAMES, "skip") == expected


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    message = (
        r"^skip pattern 'layers\.0\.mpl\.weight' matches no parameter of the model.*"
        r"did you mean 'layers\.0\.mlp\.weight'\?.*shell-style"
    )
    with pytest.raises(ValueError, match=message):
        matching(["*.attn.*", "layers.0.mpl.weight"], NAMES, "skip")


def test_a_pattern_unlike_any_name_is_refused_without_a_guess() -> None:
    with pytest.raises(ValueError, match="rules pattern 'xyz' matches no parameter") as caught:
        matching(["xyz"], NAMES, "rules")
    assert "did you mean" not in str(caught.value)


def test_heads_of_attention_are_pruned() -> None:
    block = nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(4, 4)])})
    assert prunable(nn.ModuleDict({"block": block})) == ["block.heads.0.weight"]
