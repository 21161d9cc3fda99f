"""Methods of pruning in whole runs: tickets, and masks that change."""

from pathlib import Path
from typing import Any

import pytest

import samo
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig
from samo.pruning.mask_schedules import cubic_sparsity
from samo.train.learner import Learner
from samo.train.masking import Masking
from samo.train.resolve import resolve
from samo.train.trainer import train
from tests.train.helpers import last_masks, lines, method_config, small

SHAPE = GPTConfig(num_layers=1, width=32, num_heads=2, context=32)


def test_a_ticket_that_settles_ends_the_dense_phase(tmp_path: Path, text: Path) -> None:
    """It is what a bird draws by hand from the same weights, observed after the same steps."""
    run = tmp_path / "run"
    train(method_config(text, "settled", save_every=1, keep=9), run)
    seen = lines(run, "observe")
    (pruned,) = lines(run, "prune")
    assert pruned["step"] == seen[-1]["step"] < 7
    assert (pruned["reason"], pruned["threshold"]) == ("settled", 0.3)
    assert max(pruned["distances"]) == seen[-1]["largest"] <= 0.3
    phases = [line["phase"] for line in lines(run, "step")]
    assert phases == ["dense"] * pruned["step"] + ["samo"] * (8 - pruned["step"])
    model = GPT(SHAPE)
    bird = samo.EarlyBird(model, 0.9, queue=3, threshold=0.3)
    drawn = []
    for line in seen:
        samo.load(run / "checkpoints" / f"step-{line['step']}", model)
        drawn.append(bird.observe())
    assert drawn == [None] * (len(drawn) - 1) + [last_masks(run)]
    assert pruned["distances"] == bird.distances[-1]


def test_a_ticket_that_never_settles_is_drawn_at_the_limit(tmp_path: Path, text: Path) -> None:
    """Masks are observed after the warmup, and compared with those in the queue."""
    train(method_config(text, "limit", warmup_steps=3, mask_every=1), tmp_path / "run")
    seen = lines(tmp_path / "run", "observe")
    assert {line["step"]: len(line["distances"]) for line in seen} == {3: 0, 4: 1, 5: 1}
    (pruned,) = lines(tmp_path / "run", "prune")
    assert (pruned["step"], pruned["reason"]) == (5, "limit")
    assert pruned["distances"] == seen[-1]["distances"]
    assert pruned["distances"][0] > pruned["threshold"] == 0.0


def test_gradual_pruning_follows_the_cubic_schedule_and_its_state_shrinks(
    tmp_path: Path, text: Path
) -> None:
    run = tmp_path / "run"
    train(method_config(text, "gradual"), run)
    (pruned,) = lines(run, "prune")
    assert (pruned["step"], pruned["sparsity"]) == (2, 0.0)
    changes = lines(run, "remap")
    assert [line["step"] for line in changes] == [4, 6, 7]
    for before, line in zip([pruned, *changes], changes):
        expected = cubic_sparsity(line["step"] - 2, 0, 5, 0.0, 0.9)
        assert line["sparsity"] == pytest.approx(expected, abs=1e-3)
        assert (line["dropped"], line["grown"]) == (before["kept"] - line["kept"], 0)
    assert last_masks(run).kept == changes[-1]["kept"]
    states = [line for line in lines(run, "state") if line["paper_bytes"] is not None]
    assert [line["step"] for line in states] == [3, 5, 7, 8, 8]
    sizes = [line["measured_bytes"] for line in states]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] == sizes[4]
    assert sizes == [line["predicted_bytes"] for line in states]


def test_the_best_checkpoint_of_gradual_pruning_is_as_sparse_as_the_last(
    tmp_path: Path, text: Path
) -> None:
    train(method_config(text, "gradual", steps=12, eval_every=1, lr=0.0), tmp_path / "run")
    best = samo.load_masks(tmp_path / "run" / "checkpoints" / "best")
    assert best == last_masks(tmp_path / "run")


@pytest.mark.parametrize("name", ["set", "rigl"])
def test_moving_masks_stay_as_sparse_and_replace_ever_fewer(
    tmp_path: Path, text: Path, name: str
) -> None:
    run = tmp_path / "run"
    train(method_config(text, name, steps=9), run)
    (pruned,) = lines(run, "prune")
    changes = lines(run, "remap")
    assert len(changes) == (2 if name == "rigl" else 3)
    for line in changes:
        assert (line["kept"], line["numel"]) == (pruned["kept"], pruned["numel"])
        assert 0 < line["dropped"] == line["grown"] <= 0.3 * line["kept"]
    assert changes[-1]["dropped"] < changes[0]["dropped"]
    last = lines(run, "state")[-1]
    assert last["measured"]["ages"] == 2 * pruned["kept"]  # updates of each weight are counted
    assert last["measured_bytes"] == last["predicted_bytes"]


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"method": "set", "dense_steps": 0, "scope": "erk"}, "random"),
        ({"method": "set", "dense_steps": 2, "scope": "erk"}, "magnitude"),
        ({"pattern": "1:4"}, "magnitude"),
    ],
    ids=str,
)
def test_the_first_masks_follow_the_settings(
    settings: dict[str, Any], method: Any, text: Path
) -> None:
    """Before training, moving masks are random: magnitudes carry no information then."""
    config = resolve(small(text, **settings))
    model = GPT(SHAPE)
    choice = {key: settings[key] for key in ("scope", "pattern") if key in settings}
    expected = samo.prune(model, config.prune.sparsity, method=method, **choice)
    masking = Masking(config, Learner(model, config))
    masking.check()
    assert masking.draw(0)[0] == expected
    assert expected.sparsity == pytest.approx(0.75 if "pattern" in settings else 0.9, abs=1e-3)


def test_moving_masks_start_from_given_ones(tmp_path: Path, text: Path) -> None:
    samo.prune(GPT(SHAPE), 0.8).save(tmp_path / "masks")
    prune = {"method": "rigl", "masks": tmp_path / "masks", "mask_every": 3, "dense_steps": 0}
    train(small(text, **prune), tmp_path / "run")
    (pruned,) = lines(tmp_path / "run", "prune")
    assert (pruned["step"], pruned["reason"]) == (0, "masks")
    first = lines(tmp_path / "run", "remap")[0]
    assert (first["step"], first["kept"]) == (3, pruned["kept"])
    assert pruned["sparsity"] == pytest.approx(0.8, abs=1e-3)  # not the 0.9 of settings
