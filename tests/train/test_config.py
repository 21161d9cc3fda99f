"""Settings: what follows from what, and what is refused before anything is made."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from samo.errors import ConfigError
from samo.models.gpt import GPT
from samo.models.shapes import SHAPES, GPTConfig
from samo.train.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PruneConfig,
    RunConfig,
    TrainConfig,
    gpt_config,
    resolve,
)
from samo.train.config_mesh import MeshConfig

NOTES = DataConfig(train=(Path("notes.txt"),))
SHARDED = MeshConfig(shard="weights")


def config(**sections: object) -> TrainConfig:
    return TrainConfig(**{"data": NOTES, **sections})


def test_pruned_weights_that_start_anew_learn_faster() -> None:
    def power(**sections: object) -> object:
        return resolve(config(**sections)).optim.density_power

    assert power() == -1
    assert power(optim=OptimConfig(lr=0.1)) == -1
    assert power(model=ModelConfig(init=Path("runs/dense/checkpoints/best"))) == 0
    assert power(run=RunConfig(mode="dense")) == 0
    assert power(optim=OptimConfig(density_power=-0.5)) == -0.5


def test_a_resolved_config_says_auto_only_where_data_or_hardware_decide() -> None:
    resolved = resolve(config())
    open_questions = {
        f"{section.name}.{entry.name}"
        for section in fields(TrainConfig)
        for entry in fields(getattr(resolved, section.name))
        if getattr(getattr(resolved, section.name), entry.name) == "auto"
    }
    assert open_questions == {
        "data.vocab_size",
        "run.device",
        "run.dtype",
        "mesh.data",  # stays so: a run may go on with another number of ranks
        "mesh.micro_batches",
    }


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(config(model=ModelConfig(shape="mini", width=64)))
    assert resolve(once) == once
    assert once.model.width == 64
    assert once.model.num_layers == SHAPES["mini"].num_layers


@pytest.mark.parametrize(
    ("prune", "model", "expected"),
    [
        (PruneConfig(), ModelConfig(), 200),
        (PruneConfig(dense_steps=7), ModelConfig(), 7),
        (PruneConfig(), ModelConfig(init=Path("checkpoint")), 0),
        (PruneConfig(masks=Path("masks")), ModelConfig(), 0),
    ],
)
def test_the_dense_phase_is_a_fifth_unless_something_trained_is_given(
    prune: PruneConfig, model: ModelConfig, expected: int
) -> None:
    assert resolve(config(prune=prune, model=model)).prune.dense_steps == expected


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_shape_is_a_model(name: str) -> None:
    shape = gpt_config(resolve(config(model=ModelConfig(shape=name))).model, 50257)
    assert shape.width % shape.num_heads == 0
    assert shape.vocab_size == 50257


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3-125m", 0.125), ("gpt3-350m", 0.356), ("gpt3-760m", 0.76), ("gpt3-1.3b", 1.316),
     ("gpt3-2.7b", 2.65), ("gpt3-6.7b", 6.66), ("gpt3-13b", 12.85), ("gpt3-175b", 174.6)],
)  # fmt: skip
def test_the_gpt3_family_has_the_sizes_of_its_paper(name: str, billions: float) -> None:
    import torch

    with torch.device("meta"):  # tied, as in GPT-3
        model = GPT(
            gpt_config(resolve(config(model=ModelConfig(shape=name, tied=True))).model, 50257)
        )
    size = sum(param.numel() for param in model.parameters()) / 1e9
    assert size == pytest.approx(billions, rel=0.01)


BAD = [
    (config(data=DataConfig()), "no text to train on; name a file: samo train notes.txt"),
    (config(run=RunConfig(steps=0)), "steps must be 1 or more, and less than 2.31, got 0"),
    (config(model=ModelConfig(width=0)), "width must be 1 or more, and"),
    (config(data=replace(NOTES, vocab_size=0)), "vocab_size must be 1 or more, and"),
    (config(model=ModelConfig(num_heads=3)), "num_heads must divide width, got 3 heads and width 128"),
    (config(data=replace(NOTES, valid_fraction=1.0)), "valid_fraction must lie between 0 and 1, got 1"),
    (config(prune=PruneConfig(sparsity=90)), "sparsity must be .* less than 1, got 90; 0.9 prunes 90 %"),
    (config(prune=PruneConfig(rules={"a.*": -1.0})), r"a.\* must be at least 0"),
    (config(optim=OptimConfig(lr=float("nan"))), "lr must be a number of 0 or more, got nan"),
    (config(optim=OptimConfig(density_power=-4)), "density_power must be a number from -3 to 3, got -4; -1 makes"),
    (config(run=RunConfig(mode="dense"), optim=OptimConfig(density_power=-1)), "mode dense prunes nothing, and density_power -1 would have no effect"),
    (config(optim=OptimConfig(clip=-1.0)), "clip must be a number of 0 or more, got -1"),
    (config(optim=OptimConfig(betas=(0.9, 1.0))), r"betas must be two numbers in \[0, 1\)"),
    (config(run=RunConfig(seed=-1)), "seed must be a number of 0 or more, got -1"),
    (config(run=RunConfig(seed=2**63)), "seed must be a number of 0 or more, got 9223"),
    (config(prune=PruneConfig(dense_steps=1000)), "dense_steps 1,000 leaves none of the 1,000 steps"),
    (config(run=RunConfig(mode="dense"), prune=PruneConfig(method="random")), "mode dense prunes nothing, and method would have no effect"),
    (config(run=RunConfig(mode="dense"), prune=PruneConfig(dense_steps=5)), "mode dense prunes nothing, and dense_steps would"),
    (config(prune=PruneConfig(masks=Path("m"), sparsity=0.5)), "masks are taken from 'm', so sparsity would have no effect"),
    (config(prune=PruneConfig(masks=Path("m"), pattern="2:4")), "masks are taken from 'm', so sparsity, pattern would"),
    (config(prune=PruneConfig(pattern="4:2")), "pattern is '4:2', but a pattern is 'n:m'"),
    (config(prune=PruneConfig(pattern="2:4", sparsity=0.9)), "pattern '2:4' prunes 0.5 of the weights, which contradicts"),
    (config(prune=PruneConfig(pattern="2:4", scope="erk")), "pattern 2:4 gives every matrix the same sparsity, and scope erk"),
    (config(prune=PruneConfig(sparsity=0.0)), "sparsity 0 prunes nothing"),
    (config(run=RunConfig(dtype="float32", fp32_gradients=True)), "fp32_gradients has no effect with dtype float32"),
    (config(run=RunConfig(weights="some")), "weights must be resident, streamed, or an amount of memory .*, got 'some'; write it as 4GB"),
    (config(run=RunConfig(weights="-1GB")), "weights must be resident, streamed, or an amount .*, got '-1GB'"),
    (config(run=RunConfig(weights=-1)), "weights must be resident, streamed, or an amount .*, got '-1'"),
    (config(run=RunConfig(weights="1e9GB")), "weights must be .*, got '1e9GB'"),
    (config(run=RunConfig(weights="99999999999TB")), "weights must be .*, got '99999999999TB'"),
    (config(run=RunConfig(mode="dense", weights="streamed")), "mode dense keeps its weights dense, and weights streamed would have no effect"),
    (config(mesh=SHARDED, run=RunConfig(mode="dense")), "shard weights divides the kept values of a pruned model, and the mode is dense"),
    (config(mesh=replace(SHARDED, pipe=2)), "shard weights divides a whole model .*, and pipe 2 cuts it into stages; use --pipe 1, or"),
    (config(mesh=SHARDED, prune=PruneConfig(method="set")), "method set changes masks, and with shard weights each rank holds a share"),
    (config(mesh=SHARDED, optim=OptimConfig(state="lean")), "shard weights cuts values anywhere, and state lean goes by their places"),
    (config(mesh=SHARDED, run=RunConfig(weights="1kB")), "shard weights streams all dense weights, and an amount of 1000 bytes that stay"),
    (config(run=RunConfig(mode="dense"), optim=OptimConfig(state="lean")), "state lean is for mode samo, and the mode is dense"),
    (config(prune=PruneConfig(threshold=0.2)), "threshold is a setting of method early-bird, and with method magnitude it would"),
    (config(prune=PruneConfig(method="rigl", queue=3)), "queue is a setting of method early-bird, and with method rigl it"),
    (config(prune=PruneConfig(method="random", mask_every=5)), "mask_every is a setting of method early-bird, gradual, set or rigl, and"),
    (config(prune=PruneConfig(method="gradual", drop=0.2)), "drop is a setting of method set or rigl, and with method gradual"),
    (config(prune=PruneConfig(method="early-bird", mask_stop=9)), "mask_stop is a setting of method gradual, set or rigl"),
    (config(run=RunConfig(mode="dense"), prune=PruneConfig(method="set")), "mode dense prunes nothing, and method would"),
    (config(prune=PruneConfig(method="set", mask_every=0)), "mask_every must be 1 or more, and less than 2.31, got 0"),
    (config(prune=PruneConfig(method="early-bird", queue=1)), "queue must be 2 or more, and less than 2.31, got 1"),
    (config(prune=PruneConfig(method="early-bird", threshold=1.0)), "threshold must be at least 0 and less than 1, got 1.0; 0.1 means"),
    (config(prune=PruneConfig(method="early-bird", mask_every=101)), "none can settle before step 505, and the dense phase ends at step 500; raise"),
    (config(prune=PruneConfig(method="early-bird", dense_steps=0)), "the dense phase ends at step 0; raise --dense-steps or --steps, or lower --mask-every, --queue"),
    (config(run=RunConfig(mode="dense"), prune=PruneConfig(method="rigl")), "mode dense prunes nothing, and method would have no effect"),
    (config(prune=PruneConfig(method="rigl", mask_every=100, mask_stop=100)), "moves masks every 100 steps after the dense phase, which ends at step 0, and no more from mask_stop 100 on"),
    (config(prune=PruneConfig(method="gradual", mask_stop=200)), "mask_stop 200 is not after the dense phase, which ends at step 200"),
    (config(prune=PruneConfig(method="set", pattern="2:4")), "method set would not keep to pattern 2:4 when it changes masks"),
    (config(prune=PruneConfig(method="set", drop=0.0)), "drop must be more than 0 and at most 1, got 0.0; 0.3 replaces"),
    (config(prune=PruneConfig(method="rigl"), optim=OptimConfig(state="lean")), "method rigl counts the updates of each weight, which state lean"),
    (config(prune=PruneConfig(method="gradual", mask_stop=1001)), "reaches its sparsity at mask_stop 1,001, and the run ends at step 1,000"),
    (config(prune=PruneConfig(method="gradual", scope="erk", rules={"a": 0.5})), "every matrix to the same sparsity, and scope or rules would"),
    (config(prune=PruneConfig(method="early-bird", masks=Path("m"))), "masks are taken from 'm', so method would have no effect"),
    (config(data=replace(NOTES, valid=(Path("v"),), valid_fraction=0.2)), "valid_fraction has no effect when files"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_settings_that_cannot_be_meant_are_refused(bad: TrainConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(bad)


def test_the_sparsity_is_nine_tenths_or_that_of_the_pattern_and_stays_so() -> None:
    assert resolve(config()).prune.sparsity == 0.9
    once = resolve(config(prune=PruneConfig(pattern="1:4")))
    assert once.prune.sparsity == 0.75
    assert resolve(once) == once


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("resident", "resident"),
        ("streamed", "streamed"),
        (0, 0),
        ("4GB", 4 * 10**9),
        ("4 gb", 4 * 10**9),
        ("1.5GB", 1_500_000_000),
        ("500MB", 500 * 10**6),
        ("20kB", 20_000),
        ("2TB", 2 * 10**12),
        ("512MiB", 512 * 2**20),
        ("7 B", 7),
        ("1_000", 1000),
    ],
)
def test_an_amount_of_weights_becomes_bytes_and_stays_so(
    given: str | int, expected: str | int
) -> None:
    once = resolve(config(run=RunConfig(weights=given)))
    assert once.run.weights == expected
    assert resolve(once) == once


def test_weights_that_are_sharded_are_streamed() -> None:
    once = resolve(config(mesh=SHARDED))
    assert once.run.weights == "streamed"
    assert resolve(once) == once


def test_a_gpt_of_no_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers must be 1 or more, got 0"):
        GPTConfig(num_layers=0)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("magnitude", {"dense_steps": 200, "mask_every": 0, "mask_stop": 0, "history": False}),
        ("early-bird", {"dense_steps": 500, "mask_every": 5, "mask_stop": 0, "history": True}),
        ("gradual", {"dense_steps": 200, "mask_every": 25, "mask_stop": 800, "history": False}),
        ("set", {"dense_steps": 0, "mask_every": 25, "mask_stop": 750, "history": False}),
        ("rigl", {"dense_steps": 0, "mask_every": 25, "mask_stop": 750, "history": False}),
    ],
)
def test_the_settings_of_a_method_follow_from_the_steps(
    method: str, expected: dict[str, object]
) -> None:
    prune = resolve(config(prune=PruneConfig(method=method))).prune
    assert {name: getattr(prune, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("steps", "every"), [(40, 3), (100, 5), (300, 5), (1000, 5), (1200, 6), (20_000, 100)]
)
def test_early_bird_looks_every_five_steps_at_most_if_there_is_room(steps: int, every: int) -> None:
    run, prune = RunConfig(steps=steps), PruneConfig(method="early-bird")
    assert resolve(config(run=run, prune=prune)).prune.mask_every == every


def test_masks_of_all_observations_are_held_in_small_models_alone() -> None:
    prune = PruneConfig(method="early-bird")
    small, large = (
        resolve(config(prune=prune, model=ModelConfig(shape=shape))).prune.history
        for shape in ("small", "gpt3-125m")
    )
    assert (small, large) == (True, False)


def test_moving_masks_can_start_from_given_ones() -> None:
    resolved = resolve(config(prune=PruneConfig(method="rigl", masks=Path("m"))))
    assert resolved.prune.dense_steps == 0


@given(st.integers(12, 10**6), st.sampled_from(["early-bird", "gradual", "set", "rigl"]))
def test_the_defaults_of_a_method_fit_each_other_at_any_length(steps: int, method: str) -> None:
    once = resolve(config(run=RunConfig(steps=steps), prune=PruneConfig(method=method)))
    assert resolve(once) == once
    assert 1 <= once.prune.mask_every <= steps
    assert once.prune.mask_stop <= steps


@given(st.integers(1, 10**6), st.sampled_from(list(SHAPES)))
def test_defaults_fit_each_other_at_any_length(steps: int, shape: str) -> None:
    resolved = resolve(config(run=RunConfig(steps=steps), model=ModelConfig(shape=shape)))
    assert 0 <= resolved.prune.dense_steps < steps
    assert 0 <= resolved.optim.warmup_steps <= 1000
