"""Settings: what follows from what, and what is refused before anything is created."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from samo.errors import ConfigError
from samo.models.gpt import GPT
from samo.models.shapes import SHAPES, GPTConfig
from samo.train.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PruneConfig,
    RunConfig,
    TrainConfig,
)
from samo.train.config_rules import check_batch, micro_batches
from samo.train.resolve import changes, gpt_config, resolve, resolve_resumed

NOTES = DataConfig(train=(Path("/notes.txt"),))
SHARDED = MeshConfig(shard="weights")


def config(**sections: Any) -> TrainConfig:
    return TrainConfig(**{"data": NOTES, **sections})


def test_auto_stays_only_where_data_or_ranks_decide() -> None:
    once = resolve(config(model=ModelConfig(shape="mini", width=64)))
    assert (once.model.width, once.model.num_layers) == (64, SHAPES["mini"].num_layers)
    open_questions = {
        f"{section.name}.{entry.name}"
        for section in fields(TrainConfig)
        for entry in fields(getattr(once, section.name))
        if getattr(getattr(once, section.name), entry.name) == "auto"
    }
    assert open_questions == {"data.vocab_size", "mesh.data", "mesh.micro_batches"}
    assert resolve(once) == once


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {"prune.dense_steps": 200, "prune.sparsity": 0.9, "optim.density_power": -1}),
        ({"optim": OptimConfig(lr=0.1)}, {"optim.density_power": -1}),
        ({"optim": OptimConfig(density_power=-0.5)}, {"optim.density_power": -0.5}),
        ({"run": RunConfig(mode="dense")}, {"optim.density_power": 0, "prune.dense_steps": 0}),
        ({"prune": PruneConfig(dense_steps=7)}, {"prune.dense_steps": 7}),
        ({"model": ModelConfig(init=Path("/c"))}, {"prune.dense_steps": 0, "optim.density_power": 0}),
        ({"prune": PruneConfig(masks=Path("/m"))}, {"prune.dense_steps": 0}),
        ({"prune": PruneConfig(method="rigl", masks=Path("/m"))}, {"prune.dense_steps": 0}),
        ({"prune": PruneConfig(pattern="1:4")}, {"prune.sparsity": 0.75}),
        ({"mesh": SHARDED}, {"run.weights": "streamed"}),
        ({"run": RunConfig(weights="4GB")}, {"run.weights": 4 * 10**9}),
        ({"run": RunConfig(weights="4 gb")}, {"run.weights": 4 * 10**9}),
        ({"run": RunConfig(weights="1.5GB")}, {"run.weights": 1_500_000_000}),
        ({"run": RunConfig(weights="512MiB")}, {"run.weights": 512 * 2**20}),
        ({"run": RunConfig(weights="7 B")}, {"run.weights": 7}),
        ({"run": RunConfig(weights="1_000")}, {"run.weights": 1000}),
        ({"run": RunConfig(weights=0)}, {"run.weights": 0}),
        ({"prune": PruneConfig(method="early-bird")}, {"prune.dense_steps": 500, "prune.mask_every": 5, "prune.mask_stop": 0, "prune.history": True}),
        ({"prune": PruneConfig(method="early-bird"), "model": ModelConfig(shape="gpt3-125m")}, {"prune.history": False}),
        ({"prune": PruneConfig(method="early-bird"), "run": RunConfig(steps=40)}, {"prune.mask_every": 3}),
        ({"prune": PruneConfig(method="early-bird"), "run": RunConfig(steps=20_000)}, {"prune.mask_every": 100}),
        ({"prune": PruneConfig(method="gradual")}, {"prune.dense_steps": 200, "prune.mask_every": 25, "prune.mask_stop": 800}),
        ({"prune": PruneConfig(method="rigl")}, {"prune.dense_steps": 0, "prune.mask_every": 25, "prune.mask_stop": 750}),
    ],
)  # fmt: skip
def test_values_follow_from_others(sections: dict[str, Any], expected: dict[str, Any]) -> None:
    once = resolve(config(**sections))
    found = {}
    for key in expected:
        section, _, name = key.partition(".")
        found[key] = getattr(getattr(once, section), name)
    assert found == expected
    assert resolve(once) == once


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3-125m", 0.125), ("gpt3-350m", 0.356), ("gpt3-760m", 0.76), ("gpt3-1.3b", 1.316),
     ("gpt3-2.7b", 2.65), ("gpt3-6.7b", 6.66), ("gpt3-13b", 12.85), ("gpt3-175b", 174.6)],
)  # fmt: skip
def test_the_gpt3_family_has_the_sizes_of_its_paper(name: Any, billions: float) -> None:
    model = resolve(config(model=ModelConfig(shape=name, tied=True))).model  # tied, as in GPT-3
    with torch.device("meta"):
        params = GPT(gpt_config(model, 50257)).parameters()
    assert sum(param.numel() for param in params) / 1e9 == pytest.approx(billions, rel=0.01)


BAD = [
    (config(data=DataConfig()), "no text to train on; name a file: samo train notes.txt"),
    (config(run=RunConfig(steps=0)), "--steps must be 1 or more, and less than 2.31, got 0"),
    (config(model=ModelConfig(width=0)), "--width must be 1 or more, and"),
    (config(data=replace(NOTES, vocab_size=0)), "--vocab-size must be 1 or more, and"),
    (config(model=ModelConfig(num_heads=3)), "--num-heads must divide --width, got 3 heads and width 128"),
    (config(data=replace(NOTES, valid_fraction=1.0)), "--valid-fraction must be between 0 and 1, got 1"),
    (config(prune=PruneConfig(sparsity=90)), "--sparsity must be .* less than 1, got 90; 0.9 prunes 90 %"),
    (config(prune=PruneConfig(rules={"a.*": -1.0})), r"a.\* must be at least 0"),
    (config(optim=OptimConfig(lr=float("nan"))), "--lr must be a number of 0 or more, got nan"),
    (config(optim=OptimConfig(density_power=-4)), "--density-power must be from -3 to 3, got -4; -1 trains"),
    (config(run=RunConfig(mode="dense"), optim=OptimConfig(density_power=-1)), "--density-power -1 would have no effect with --mode dense"),
    (config(optim=OptimConfig(clip=-1.0)), "--clip must be a number of 0 or more, got -1"),
    (config(optim=OptimConfig(betas=(0.9, 1.0))), r"--betas must be two numbers in \[0, 1\)"),
    (config(run=RunConfig(seed=-1)), "--seed must be a number of 0 or more, got -1"),
    (config(run=RunConfig(seed=2**63)), "--seed must be a number of 0 or more, got 9223"),
    (config(prune=PruneConfig(dense_steps=1000)), "--dense-steps 1,000 leaves none of the 1,000 steps"),
    (config(run=RunConfig(mode="dense"), prune=PruneConfig(method="random")), "--method would have no effect with --mode dense"),
    (config(run=RunConfig(mode="dense"), prune=PruneConfig(dense_steps=5)), "--dense-steps would have no effect with --mode dense"),
    (config(prune=PruneConfig(masks=Path("m"), sparsity=0.5)), "--sparsity would have no effect with --masks m; leave one"),
    (config(prune=PruneConfig(masks=Path("m"), pattern="2:4")), "--sparsity, --pattern would have no effect with --masks m"),
    (config(prune=PruneConfig(pattern="4:2")), "pattern is '4:2', but a pattern is 'n:m'"),
    (config(prune=PruneConfig(pattern="2:4", sparsity=0.9)), "pattern '2:4' prunes 0.5 of the weights, which contradicts"),
    (config(prune=PruneConfig(pattern="2:4", scope="erk")), "--scope erk would have no effect with --pattern 2:4: it gives every matrix the same sparsity"),
    (config(prune=PruneConfig(sparsity=0.0)), "--sparsity 0 prunes nothing"),
    (config(run=RunConfig(dtype="float32", fp32_gradients=True)), "--fp32-gradients would have no effect with dtype float32"),
    (config(run=RunConfig(weights="some")), "--weights must be resident, streamed, or an amount of memory .*, got 'some'; write it as 4GB"),
    (config(run=RunConfig(weights="-1GB")), "--weights must be resident, streamed, or an amount .*, got '-1GB'"),
    (config(run=RunConfig(weights=-1)), "--weights must be resident, streamed, or an amount .*, got '-1'"),
    (config(run=RunConfig(weights="1e9GB")), "--weights must be .*, got '1e9GB'"),
    (config(run=RunConfig(weights="99999999999TB")), "--weights must be .*, got '99999999999TB'"),
    (config(run=RunConfig(mode="dense", weights="streamed")), "--weights streamed would have no effect with --mode dense"),
    (config(mesh=SHARDED, run=RunConfig(mode="dense")), "--shard weights would have no effect with --mode dense"),
    (config(mesh=replace(SHARDED, pipe=2)), "--shard weights does not work with --pipe 2: each stage holds a part"),
    (config(mesh=SHARDED, prune=PruneConfig(method="set")), "--shard weights does not work with --method set: it changes masks; use magnitude"),
    (config(mesh=SHARDED, optim=OptimConfig(state="lean")), "--shard weights does not work with --state lean: shards may split"),
    (config(mesh=SHARDED, run=RunConfig(weights="1kB")), "--weights 1000 would have no effect with --shard weights: it streams all weights"),
    (config(run=RunConfig(mode="dense"), optim=OptimConfig(state="lean")), "--state lean would have no effect with --mode dense"),
    (config(prune=PruneConfig(threshold=0.2)), "--threshold would have no effect with --method magnitude: it is a setting of method early-bird"),
    (config(prune=PruneConfig(method="rigl", queue=3)), "--queue would have no effect with --method rigl: it is a setting of method early-bird"),
    (config(prune=PruneConfig(method="random", mask_every=5)), "--mask-every would have no effect with --method random: it is a setting of method early-bird, gradual, set or rigl"),
    (config(prune=PruneConfig(method="gradual", drop=0.2)), "--drop would have no effect with --method gradual: it is a setting of method set or rigl"),
    (config(prune=PruneConfig(method="early-bird", mask_stop=9)), "--mask-stop would have no effect .*: it is a setting of method gradual, set or rigl"),
    (config(prune=PruneConfig(method="set", mask_every=0)), "--mask-every must be 1 or more, and less than 2.31, got 0"),
    (config(prune=PruneConfig(method="early-bird", queue=1)), "--queue must be 2 or more, and less than 2.31, got 1"),
    (config(prune=PruneConfig(method="early-bird", threshold=1.0)), "--threshold must be at least 0 and less than 1, got 1.0; 0.1 means"),
    (config(prune=PruneConfig(method="early-bird", mask_every=101)), "cannot be stable before step 505, and the dense phase ends at step 500; raise"),
    (config(prune=PruneConfig(method="early-bird", dense_steps=0)), "the dense phase ends at step 0; raise --dense-steps or --steps, or lower --mask-every, --queue"),
    (config(prune=PruneConfig(method="rigl", mask_every=100, mask_stop=100)), "moves masks every 100 steps between the dense phase, which ends at step 0, and --mask-stop 100, which leaves none"),
    (config(prune=PruneConfig(method="gradual", mask_stop=200)), "--mask-stop 200 is not after the dense phase, which ends at step 200"),
    (config(prune=PruneConfig(method="set", pattern="2:4")), "--method set does not work with --pattern 2:4: masks would not keep to it"),
    (config(prune=PruneConfig(method="set", drop=0.0)), "--drop must be more than 0 and at most 1, got 0.0; 0.3 replaces"),
    (config(prune=PruneConfig(method="rigl"), optim=OptimConfig(state="lean")), "--method rigl does not work with --state lean: it counts the updates of each weight"),
    (config(prune=PruneConfig(method="gradual", mask_stop=1001)), "reaches its sparsity at --mask-stop 1,001, and the run ends at step 1,000"),
    (config(prune=PruneConfig(method="gradual", scope="erk", rules={"a": 0.5})), "--scope, --rules would have no effect with --method gradual: it prunes every matrix alike"),
    (config(prune=PruneConfig(method="early-bird", masks=Path("m"))), "--method would have no effect with --masks m"),
    (config(data=replace(NOTES, valid=(Path("v"),), valid_fraction=0.2)), "--valid-fraction would have no effect with --valid"),
    (config(mesh=MeshConfig(pipe=0)), "--pipe must be 1 or more"),
    (config(mesh=MeshConfig(timeout_s=0.0)), "--timeout-s must be a number of seconds over 0"),
    (config(mesh=MeshConfig(micro_batches=2)), "--micro-batches would have no effect with --pipe 1: the model is not split"),
    (config(mesh=MeshConfig(pipe=7)), "a model of 4 blocks has 6 layers .* too few for 7 stages"),
    (config(mesh=MeshConfig(pipe=2), prune=PruneConfig(scope="erk")), "--scope erk does not work with --pipe 2: it compares the weights of all stages"),
    (config(mesh=MeshConfig(pipe=2), prune=PruneConfig(method="rigl")), "--method rigl does not work with --pipe 2: it needs the masks of all stages"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_settings_that_cannot_work_are_refused(bad: TrainConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(bad)


def test_a_gpt_of_no_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers must be 1 or more, got 0"):
        GPTConfig(num_layers=0)


@given(
    st.integers(12, 10**6),
    st.sampled_from(["magnitude", "early-bird", "gradual", "set", "rigl"]),
    st.sampled_from(list(SHAPES)),
)
def test_defaults_fit_each_other_at_any_length(steps: int, method: Any, shape: Any) -> None:
    once = resolve(
        config(
            run=RunConfig(steps=steps),
            prune=PruneConfig(method=method),
            model=ModelConfig(shape=shape),
        )
    )
    assert resolve(once) == once
    assert 0 <= once.prune.dense_steps < steps
    assert 0 <= once.optim.warmup_steps <= 1000
    assert (method != "magnitude") <= once.prune.mask_every <= steps
    assert once.prune.mask_stop <= steps


# Resumed runs
# -----------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_settings_but_for_some() -> None:
    before = resolve(config(mesh=MeshConfig(pipe=2, micro_batches=3, stages_per_rank=2)))
    longer = replace(before, run=replace(before.run, steps=2000))
    assert resolve_resumed(before, longer) == longer
    typed = config(run=RunConfig(steps=2000), mesh=before.mesh)  # "auto" is as recorded
    assert resolve_resumed(before, typed) == longer
    one = resolve_resumed(before, replace(before, mesh=replace(before.mesh, pipe=1)))
    assert one.mesh == MeshConfig()  # settings of stages go with them
    with pytest.raises(ConfigError, match="--micro-batches would have no effect with --pipe 1"):
        resolve_resumed(before, replace(before, mesh=MeshConfig(micro_batches=4)))
    with pytest.raises(ConfigError, match=r"model.width was 128, not 64; leave it out, or start"):
        resolve_resumed(before, replace(before, model=replace(before.model, width=64)))
    with pytest.raises(ConfigError, match=r"prune.method was 'magnitude', not 'rigl'"):
        resolve_resumed(before, replace(typed, prune=PruneConfig(method="rigl")))
    assert changes(before, longer) == {"run.steps": (1000, 2000)}


# Ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_replicas", "batch_size", "mesh", "message"),
    [
        (8, 7, {}, "a batch of 7 sequences cannot be divided among 8 replicas; raise --batch-size to 8"),
        (2, 7, {"pipe": 2, "micro_batches": 4}, "the 3 sequences of a replica cannot be split into 4"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_divided_is_refused(
    num_replicas: int, batch_size: int, mesh: dict[str, Any], message: str
) -> None:
    one = resolve(config(run=RunConfig(batch_size=batch_size), mesh=MeshConfig(**mesh)))
    with pytest.raises(ConfigError, match=message):
        check_batch(one, num_replicas)


def test_there_are_two_micro_batches_for_each_stage_if_there_are_sequences() -> None:
    one = resolve(config(run=RunConfig(batch_size=7), mesh=MeshConfig(pipe=2)))
    assert [micro_batches(one, n) for n in (1, 2, 7)] == [4, 3, 1]
