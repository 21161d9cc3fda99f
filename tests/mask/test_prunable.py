"""Which parameters are pruned by default: the matrices of real architectures, and not the rest."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from samo.mask.prunable import matching, prunable
from tests.pruning.language_models import language_model


def linears(prefix: str, *names: str) -> list[str]:
    return [f"{prefix}.{name}.weight" for name in names]


ATTENTION = linears("model.layers.0.self_attn", "q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "own head"])
def test_gpt2_prunes_its_conv1d_matrices_and_no_table(tied: bool) -> None:
    expected = [
        f"transformer.h.{layer}.{name}.weight"
        for layer in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert prunable(language_model("gpt2", tie_word_embeddings=tied)) == expected


def test_llama_prunes_gate_proj_but_no_head() -> None:
    model = language_model("llama", num_hidden_layers=1)
    mlp = linears("model.layers.0.mlp", "gate_proj", "up_proj", "down_proj")
    assert prunable(model) == ATTENTION + mlp
    names = prunable(nn.ModuleDict({"inner": model}))  # a wrapper does not know the head
    assert names == [f"inner.{name}" for name in prunable(model)]


def test_mixtral_prunes_stacked_experts_but_no_router() -> None:
    experts = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert prunable(language_model("mixtral", num_hidden_layers=1)) == ATTENTION + experts


def test_the_head_of_a_hugging_face_model_is_known_whatever_its_name() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, tie_word_embeddings=False)
    names = prunable(transformers.BertForMaskedLM(config))
    assert "cls.predictions.decoder.weight" not in names
    assert "bert.encoder.layer.0.output.dense.weight" in names


def test_a_resnet_prunes_its_convolutions_but_not_the_root_fc() -> None:
    block = {"conv1": nn.Conv2d(8, 16, 3), "bn1": nn.BatchNorm2d(16), "fc": nn.Linear(16, 16)}
    model = nn.ModuleDict(
        {
            "conv1": nn.Conv2d(3, 8, 7, bias=False),
            "layer1": nn.Sequential(nn.ModuleDict(block)),
            "fc": nn.Linear(16, 10),
        }
    )
    assert prunable(model) == ["conv1.weight", *linears("layer1.0", "conv1", "fc")]


HEADS = ["head", "heads", "classifier", "score", "lm_head", "output", "classifier.dense"]
ROUTERS = ["moe.gate", "moe.router", "moe.expert_router", "moe.shared_expert_gate"]


def test_heads_and_routers_are_not_pruned_but_heads_of_attention_are() -> None:
    for path in HEADS + ROUTERS:
        layer: Any = nn.Linear(4, 4)
        for name in reversed(path.split(".")):
            layer = nn.ModuleDict({name: layer})
        assert prunable(nn.ModuleDict({"body": nn.Linear(4, 4), **layer})) == ["body.weight"], path
    block = nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(4, 4)])})
    assert prunable(nn.ModuleDict({"block": block})) == ["block.heads.0.weight"]


def test_the_output_layer_of_a_block_is_no_head() -> None:
    block = nn.ModuleDict({"output": nn.Linear(4, 4), "gate": nn.Linear(4, 4)})
    model = nn.ModuleDict({"layers": nn.ModuleList([block]), "output": nn.Linear(4, 4)})
    assert prunable(model) == ["layers.0.output.weight"]


def test_attention_prunes_its_matrices_but_no_bias() -> None:
    assert prunable(nn.MultiheadAttention(8, 2)) == ["in_proj_weight", "out_proj.weight"]
    attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True)
    expected = [*(f"{letter}_proj_weight" for letter in "qkv"), "out_proj.weight"]
    assert prunable(attention) == expected


def test_layers_on_their_own_prune_a_matrix_or_nothing() -> None:
    convs = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    for layer in (nn.Linear(4, 4), *(conv(2, 2, 3) for conv in convs + transposed)):
        assert prunable(layer) == ["weight"]
    tables = nn.Embedding(4, 4), nn.EmbeddingBag(4, 4), nn.PReLU(4), nn.Identity()
    for other in (*tables, nn.LayerNorm(4), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)):
        assert prunable(nn.ModuleDict({"layer": other})) == []


class FusedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 8, 6))
        self.w1_bias = nn.Parameter(torch.randn(4, 1, 6))
        self.scale = nn.Parameter(torch.randn(4, 8))


def test_stacked_experts_are_told_by_class_or_place_and_must_have_three_dims() -> None:
    model = nn.ModuleDict({"ffn": FusedExperts(), "experts": nn.Module(), "other": nn.Module()})
    model["experts"].w2 = nn.Parameter(torch.randn(4, 6, 8))
    model["other"].w2 = nn.Parameter(torch.randn(4, 6, 8))
    assert prunable(model) == ["ffn.w1", "experts.w2"]


def test_tied_matrices_are_named_once_or_exempt() -> None:
    for first, second in (("body", "other"), ("body", "head"), ("embed", "body")):
        layer = nn.Embedding(4, 4) if first == "embed" else nn.Linear(4, 4)
        model = nn.ModuleDict({first: layer, second: nn.Linear(4, 4)})
        model[second].weight = model[first].weight
        assert prunable(model) == (["body.weight"] if second == "other" else [])


NAMES = dict.fromkeys(["layers.0.mlp.weight", "layers.1.mlp.weight", "layers.1.attn.weight"])


def test_patterns_match_like_a_shells() -> None:
    assert matching(["layers.1.*"], NAMES, "skip") == {
        "layers.1.mlp.weight",
        "layers.1.attn.weight",
    }
    assert matching(["*.mlp.*", "layers.[0-9].attn.weight"], NAMES, "skip") == set(NAMES)
    assert matching("*.attn.weight", NAMES, "skip") == {"layers.1.attn.weight"}
    assert matching([], NAMES, "skip") == set()


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    message = (
        r"^skip pattern 'layers\.0\.mpl\.weight' matches no parameter.*"
        r"did you mean 'layers\.0\.mlp\.weight'\?.*shell-style"
    )
    with pytest.raises(ValueError, match=message):
        matching(["*.attn.*", "layers.0.mpl.weight"], NAMES, "skip")
    with pytest.raises(ValueError, match="rules pattern 'xyz' matches no parameter;"):
        matching(["xyz"], NAMES, "rules")
