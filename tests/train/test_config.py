"""Settings: what follows from what, and what is refused before anything is created."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from samo.errors import ConfigError
from samo.models.gpt import GPT
from samo.models.shapes import SHAPES
from samo.train.config import MeshConfig, TrainConfig, with_values
from samo.train.resolve import gpt_config, resolve, resolve_resumed
from samo.train.rules import check_batch, doubts, micro_batches

SHARDED = {"shard": "weights"}
DENSE = {"mode": "dense"}


def config(**values: Any) -> TrainConfig:
    return with_values(TrainConfig(), **{"train": (Path("/notes.txt"),), **values})


def test_auto_stays_only_where_data_or_ranks_decide() -> None:
    once = resolve(config(shape="mini", width=64))
    assert (once.model.width, once.model.num_layers) == (64, SHAPES["mini"].num_layers)
    open_questions = {
        f"{section.name}.{entry.name}"
        for section in fields(TrainConfig)
        for entry in fields(getattr(once, section.name))
        if getattr(getattr(once, section.name), entry.name) == "auto"
    }
    assert open_questions == {"data.vocab_size", "mesh.data", "mesh.micro_batches"}


BIRD = {"method": "early-bird"}
MASKS = {"masks": Path("/m")}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"dense_steps": 200, "sparsity": 0.9, "density_power": -1, "compile": False}),
        ({"density_power": -0.5}, {"density_power": -0.5}),
        (DENSE, {"density_power": 0, "dense_steps": 0}),
        ({"dense_steps": 7}, {"dense_steps": 7}),
        ({"init": Path("/c")}, {"dense_steps": 0, "density_power": 0}),
        (MASKS, {"dense_steps": 0}),
        ({"pattern": "1:4"}, {"sparsity": 0.75}),
        (SHARDED, {"weights": "streamed"}),
        ({"weights": "4GB"}, {"weights": 4 * 10**9}),
        ({"weights": "1.5 gb"}, {"weights": 1_500_000_000}),
        ({"dtype": "bf16"}, {"dtype": "bfloat16"}),
        ({"weights": "7B"}, {"weights": 7}),
        ({"weights": 0}, {"weights": 0}),
        (BIRD, {"dense_steps": 500, "mask_every": 5, "mask_stop": 0}),
        ({**BIRD, "steps": 40}, {"mask_every": 3}),
        ({**BIRD, "steps": 20_000}, {"mask_every": 100}),
        ({"method": "gradual"}, {"dense_steps": 200, "mask_stop": 800}),
        ({"method": "rigl"}, {"dense_steps": 0, "mask_every": 25, "mask_stop": 750}),
    ],
)
def test_values_follow_from_others(values: dict[str, Any], expected: dict[str, Any]) -> None:
    once = resolve(config(**values))
    found: dict[str, Any] = {}
    for section in fields(TrainConfig):
        own = getattr(once, section.name)
        found |= {entry.name: getattr(own, entry.name) for entry in fields(own)}
    assert {name: found[name] for name in expected} == expected
    assert resolve(once) == once


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3-125m", 0.125), ("gpt3-350m", 0.356), ("gpt3-760m", 0.76), ("gpt3-1.3b", 1.316),
     ("gpt3-2.7b", 2.65), ("gpt3-6.7b", 6.66), ("gpt3-13b", 12.85), ("gpt3-175b", 174.6)],
)  # fmt: skip
def test_the_gpt3_family_has_the_sizes_of_its_paper(name: str, billions: float) -> None:
    model = resolve(config(shape=name, tied=True)).model  # tied, as in GPT-3
    with torch.device("meta"):
        params = GPT(gpt_config(model, 50257)).parameters()
    assert sum(param.numel() for param in params) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": ()}, "no text to train on; name a file"),
        # Ranges
        ({"steps": 0}, "--steps must be 1 or more, got 0"),
        ({"num_heads": 3}, "--num-heads must divide --width, got 3 heads"),
        ({"sparsity": 90}, "--sparsity must be 0 .* 1 .0.9 prunes 90 %.*, got 90"),
        ({"rules": {"a": 0.5, "b": 50}}, "--rules must be 0 .* prunes 90 %.*, got 50"),
        ({"lr": float("nan")}, "--lr must be 0 or more, got nan"),
        ({"density_power": -4}, "--density-power must be -3 or more"),
        ({"betas": (0.9, 1.0)}, "--betas must be 0 or more and less than 1, got 1"),
        ({"seed": 2**63}, "--seed must be 0 or more"),
        ({**BIRD, "queue": 1}, "--queue must be 2 or more"),
        ({"timeout_s": 0.0}, "--timeout-s must be 0.1 or more, got 0"),
        ({"weights": "some"}, "--weights must be .* such as 4GB or 500MB, got 'some'"),
        ({"steps": 2**31}, "--steps must be 1 or more and less than 2,147,483,648, got"),
        ({"drop": 0.0}, "--drop must be more than 0 and less than 1, got 0"),
        ({"weights": "4"}, "--weights must be .*, got '4'"),
        ({"weights": -1}, "--weights must be .*, got '-1'"),
        ({"pattern": "4:2"}, "pattern must be 'n:m' .*, got '4:2'"),
        ({"pattern": "2:4", "sparsity": 0.9}, "pattern '2:4' prunes 0.5"),
        # Settings without effect
        ({**DENSE, "method": "random"}, "--method has no effect with --mode dense"),
        ({**DENSE, "dense_steps": 5}, "--dense-steps has no effect"),
        ({**DENSE, "density_power": -1}, "--density-power -1 has no effect"),
        ({**DENSE, "weights": "streamed"}, "--weights streamed has no effect"),
        ({**DENSE, **SHARDED}, "--shard weights has no effect with --mode dense"),
        ({**DENSE, "state": "lean"}, "--state lean has no effect"),
        ({"dtype": "float32", "fp32_gradients": True}, "no effect with --dtype float32"),
        ({**MASKS, "sparsity": 0.5}, "--sparsity has no effect with --masks /m; leave"),
        ({**MASKS, "pattern": "2:4"}, "--sparsity, --pattern has no effect"),
        ({"threshold": 0.2}, "--threshold has no effect with --method magnitude"),
        ({"method": "random", "mask_every": 5}, "--mask-every has no effect"),
        ({"method": "gradual", "drop": 0.2}, "--drop has no effect"),
        ({**BIRD, "mask_stop": 9}, "--mask-stop has no effect"),
        ({"method": "gradual", "rules": {"a": 0.5}}, "--rules has no effect"),
        ({**SHARDED, "weights": "1kB"}, "--weights 1000 has no effect with --shard"),
        # Conflicts
        ({**SHARDED, "pipe": 2}, "--shard weights does not work with --pipe 2"),
        ({**SHARDED, "method": "set"}, "does not work with --method set: it chan"),
        ({**SHARDED, "state": "lean"}, "--state lean does not work with --shard"),
        ({"method": "set", "pattern": "2:4"}, "--pattern 2:4 does not work with --met"),
        ({"method": "rigl", "state": "lean"}, "it counts the updates of ea"),
        ({"pipe": 2, "scope": "erk"}, "it compares the weights of all stages"),
        ({"pipe": 2, "method": "rigl"}, "it needs the masks of all stages"),
        # Steps and stages
        ({"sparsity": 0.0}, "--sparsity 0 prunes nothing"),
        ({"dense_steps": 1000}, "--dense-steps 1,000 leaves none of the 1,000 steps"),
        ({**BIRD, "mask_every": 101}, "cannot be stable before step 505, and .* 500;"),
        ({"method": "rigl", "mask_every": 100, "mask_stop": 100}, "no step to change"),
        ({"method": "gradual", "mask_stop": 200}, "begins after step 200"),
        ({"method": "gradual", "mask_stop": 1001}, "the run ends at step 1,000"),
        ({"pipe": 7}, "a model of 4 blocks has 6 layers .* too few for 7 stages"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config(**values))


@settings(max_examples=30)
@given(
    st.integers(12, 10**6),
    st.sampled_from(["magnitude", "early-bird", "gradual", "set", "rigl"]),
    st.sampled_from(list(SHAPES)),
)
def test_defaults_fit_each_other_at_any_length(steps: int, method: str, shape: str) -> None:
    once = resolve(config(steps=steps, method=method, shape=shape))
    assert resolve(once) == once
    assert 0 <= once.prune.dense_steps < steps
    assert 0 <= once.optim.warmup_steps <= 1000
    assert 1 <= once.prune.mask_every <= steps
    assert once.prune.mask_stop <= steps


def test_a_resumed_run_keeps_its_settings_but_for_some() -> None:
    before = resolve(config(pipe=2, micro_batches=3, steps=1000))
    longer = with_values(before, steps=2000)
    assert resolve_resumed(before, longer) == longer
    typed = replace(config(steps=2000), mesh=before.mesh)  # "auto" is as recorded
    assert resolve_resumed(before, typed) == longer
    alone = replace(before, mesh=MeshConfig())
    assert resolve_resumed(before, alone).mesh == MeshConfig(pipe=1, shard="none")
    shared = replace(before, mesh=MeshConfig(shard="weights"))  # it was resident
    assert resolve_resumed(before, shared).run.weights == "streamed"
    with pytest.raises(ConfigError, match="--width was 128, not 64; leave it out, or start a new"):
        resolve_resumed(before, with_values(before, width=64))
    with pytest.raises(ConfigError, match="--steps 20 ends in the run's dense phase of 200 "):
        resolve_resumed(before, with_values(before, steps=20))
    with pytest.raises(ConfigError, match="--method was magnitude, not rigl"):
        resolve_resumed(before, with_values(typed, method="rigl"))


def test_a_batch_is_divided_among_replicas_and_micro_batches_or_refused() -> None:
    one = resolve(config(batch_size=7, pipe=2))
    assert [micro_batches(one, n) for n in (1, 2, 7)] == [4, 3, 1]  # two for each stage
    check_batch(one, 7)
    with pytest.raises(ConfigError, match=r"a batch of 7 .* 8 replicas; raise --batch-size to 8"):
        check_batch(one, 8)
    split = with_values(one, micro_batches=4)
    with pytest.raises(ConfigError, match="the 3 sequences of a replica cannot be split into 4"):
        check_batch(split, 2)


def test_settings_that_can_hardly_be_meant_are_named() -> None:
    assert list(doubts(resolve(config()))) == []
    assert list(doubts(resolve(config(lr=0.0)))) == ["--lr 0 trains nothing"]
    late = config(steps=10, lr=1.0, warmup_steps=40)
    assert [*doubts(resolve(late))] == [
        "--warmup-steps 40 takes all of the 10 steps, so the learning rate only rises, to 0.25"
    ]


def test_flags_are_unique_across_sections() -> None:
    """`CHANGEABLE`, messages and the command line name a setting without its section."""
    names = [entry.name for section in fields(TrainConfig) for entry in fields(section.type)]
    assert len(names) == len({*names})
