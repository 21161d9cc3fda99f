"""Parameters counted from a config, against transformers' own models on the meta device."""

import json
import math
import os

import pytest
import torch
import transformers

import samo
from samo.errors import ConfigError
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig
from samo.planner.configs import FAMILIES, from_config, read_config
from samo.planner.network import PRUNED, gpt
from samo.planner.public_models import PUBLIC

SMALL = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES = {
    "gpt2": [{"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 101}],
    "llama": [
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True, "head_dim": 20},
    ],
    "mistral": [{}],
    "qwen2": [{}, {"tie_word_embeddings": True}],
    "qwen3": [{}, {"head_dim": 16}],
    "gemma": [{"head_dim": 16}],
    "gemma2": [{"head_dim": 16}],
    "gemma3_text": [{"head_dim": 16}],
    "mixtral": [{"num_local_experts": 5, "num_experts_per_tok": 2}],
    "qwen2_moe": [
        {**EXPERTS, "shared_expert_intermediate_size": 40},
        {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ],
    "qwen3_moe": [{**EXPERTS, "decoder_sparse_step": 2}],
}
KNOWN = {
    "llama-2-7b": 6738415616, "llama-2-13b": 13015864320, "llama-3-8b": 8030261248,
    "llama-3-70b": 70553706496, "llama-3.1-8b": 8030261248, "llama-3.1-70b": 70553706496,
    "llama-3.2-1b": 1235814400, "llama-3.2-3b": 3212749824,
    "mistral-7b": 7248023552, "mixtral-8x7b": 46702792704, "qwen2.5-0.5b": 494032768,
    "qwen2.5-1.5b": 1543714304, "qwen2.5-3b": 3085938688, "qwen2.5-7b": 7615616512,
    "qwen2.5-14b": 14770033664, "qwen2.5-32b": 32763876352, "qwen2.5-72b": 72706203648,
    "qwen3-0.6b": 596049920, "qwen3-8b": 8190735360, "gemma-2-2b": 2614341888,
    "gemma-2-9b": 9241705984, "gemma-2-27b": 27227128320,
}  # fmt: skip
"""Parameters, as their model cards say."""


def model_of(config):
    kind = config.get("model_type")
    settings = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(kind, **settings)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(made)


@pytest.mark.parametrize(
    ("family", "case"),
    [(family, case) for family, cases in CASES.items() for case in cases],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_parameters_and_what_is_pruned_are_those_of_transformers(family, case) -> None:
    base = {} if family == "gpt2" else SMALL
    model = model_of({"model_type": family, **base, **case})
    network = from_config(model.config.to_dict())
    assert network.num_params == sum(param.numel() for param in model.parameters())
    pruned = sum(
        matrix.numel
        for layer in network.layers
        for matrix in layer.matrices
        if matrix.kind in PRUNED
    )
    assert pruned == sum(model.get_parameter(name).numel() for name in samo.prunable(model))


def test_every_family_is_tested() -> None:
    assert {*CASES} == {*FAMILIES}


@pytest.mark.parametrize("name", PUBLIC)
def test_well_known_models_have_as_many_parameters_as_their_cards_say(name, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC[name]))
    assert read_config(tmp_path).num_params == KNOWN[name]
    assert read_config(tmp_path / "config.json").num_params == KNOWN[name]


def test_samos_own_gpt_is_counted_exactly() -> None:
    for is_tied in (False, True):
        config = GPTConfig(num_layers=3, width=32, num_heads=2, vocab_size=77, is_tied=is_tied)
        expected = sum(param.numel() for param in GPT(config).parameters())
        assert gpt(config).num_params == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "lama"}', "did you mean 'llama'"),
        ('{"model_type": "llama", "hidden_size": 8}', "lacks 'vocab_size'"),
        (
            '{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 3, "vocab_size": 9}',
            "divide",
        ),
        ("[]", "not the config of a model"),
        ("{", "cannot be read as JSON: Expecting"),
        (None, "No such file"),
    ],
)
def test_a_wrong_config_is_named(content, message, tmp_path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("value", [-1, 10**9, 10**400, 1.5, math.nan, "x", True])
def test_sizes_of_a_config_are_whole_numbers_within_reason(value) -> None:
    for key in SMALL:
        with pytest.raises(ConfigError, match=f"{key} must be a whole number, 1 to [0-9,]+, got"):
            from_config({"model_type": "llama", **SMALL, key: value})


@pytest.mark.parametrize("nothing", [0, None, [], {}])
def test_a_size_of_nothing_is_as_if_it_were_not_there(nothing) -> None:
    with pytest.raises(ConfigError, match="lacks 'vocab_size'"):
        from_config({"model_type": "llama", **SMALL, "vocab_size": nothing})
    known = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    found = from_config({"model_type": "llama", **SMALL, "num_key_value_heads": nothing})
    assert found.num_params == from_config({"model_type": "llama", **known}).num_params


def test_pipes_and_devices_are_refused(tmp_path) -> None:
    config = tmp_path / "config.json"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(config)
        with pytest.raises(ConfigError, match="cannot be read as JSON: it is not a file"):
            read_config(tmp_path)
        config.unlink()
