"""``samo train --plan``: the layout for the ranks at hand, and again when a run resumes."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samo.errors import ConfigError
from samo.planner import this_machine
from samo.planner.hardware import HARDWARE, Hardware
from samo.train import planning
from samo.train.config import with_values
from samo.train.planning import check_memory
from samo.train.resolve import again, resolve, resolve_resumed
from tests.train.helpers import small
from tests.train.test_config import config

BIG: dict[str, Any] = {
    **{"shape": "gpt3-2.7b", "context": 1024, "batch_size": 8},
    **{"dtype": "bfloat16", "dense_steps": 0},
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the ranks, and the memory of each."""

    def become(ranks: int, memory_bytes: float = 141e9) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setattr(this_machine, "this_hardware", lambda device, ranks: hardware)
        hardware: Hardware = replace(HARDWARE["h200"], memory_bytes=memory_bytes)

    return become


def planned(**values: Any):
    return resolve(config(**{**BIG, "plan": True, **values}))


def test_one_rank_keeps_what_fits(machine) -> None:
    machine(1)
    roomy = planned()
    assert (roomy.run.weights, roomy.optim.state, roomy.model.checkpointing) == (
        "resident", "exact", False
    )  # fmt: skip
    assert roomy.mesh.reason.startswith("planned: resident, exact: ")
    machine(1, 16e9)
    assert planned().model.checkpointing
    machine(1, 6e9)
    tight = planned()
    assert tight.optim.state == "lean"
    assert tight.run.weights != "resident"
    assert "resident, exact takes" in tight.mesh.reason


def test_a_given_budget_is_predicted_as_one(machine) -> None:
    machine(1)
    streamed, budget = (planned(weights=held).mesh.reason for held in ("streamed", "1GB"))
    assert streamed.startswith("planned: streamed, exact: ")
    assert budget.startswith("planned: budget 1.00 GB, exact: ")


@pytest.mark.parametrize(
    "given",
    [
        {"weights": "streamed"},
        {"weights": "1GB"},
        {"state": "exact"},
        {"checkpointing": True},
        {"pipe": 1},
        {"pipe": 4},
        {"pipe": 2, "micro_batches": 2},
        {"data": 2},
        {"shard": "weights"},
        {"shard": "none"},
    ],
    ids=str,
)
def test_flags_win(machine, given: dict[str, Any]) -> None:
    machine(4, 12e9)
    found = planned(**given)
    wanted = {name: {"1GB": 10**9}.get(value, value) for name, value in given.items()}
    assert with_values(found, **wanted) == found
    assert found.mesh.planned
    assert not {*found.mesh.planned} & {*given}


@pytest.mark.parametrize(
    ("prune", "refused"),
    [
        ({"method": "rigl"}, ["pipe", "shard", "lean"]),
        ({"scope": "global", "dense_steps": 0}, ["pipe"]),
        ({"method": "gradual", "dense_steps": 10}, ["pipe", "shard"]),
    ],
    ids=str,
)
def test_what_does_not_work_together_is_not_planned(machine, prune, refused) -> None:
    machine(2, 80e9)
    found = planned(**prune)
    has = {"pipe": found.mesh.pipe > 1, "shard": found.mesh.shard == "weights"}
    has["lean"] = found.optim.state == "lean"
    assert not any(has[name] for name in refused)
    assert resolve(found) == found  # it passes all rules, and is not planned again


def test_a_model_too_large_for_one_rank_is_cut_or_sharded(machine) -> None:
    machine(1, 4e9)
    with pytest.raises(ConfigError, match="no layout that these settings allow fits on 1 x h200"):
        planned()
    machine(4, 3e9)
    found = planned()
    assert found.mesh.pipe > 1 or found.mesh.shard == "weights"
    cut = planned(shard="none")
    assert cut.mesh.pipe > 1
    assert "micro_batches" in cut.mesh.planned


def test_dense_steps_have_to_fit_too(machine) -> None:
    machine(1, 50e9)
    tight = planned(dense_steps=10)
    assert tight.model.checkpointing
    assert tight.mesh.reason.endswith("; dense steps take 43.3 GB")
    assert not planned().model.checkpointing
    machine(1, 20e9)
    with pytest.raises(ConfigError, match=r"the dense phase takes 43.3 GB on each of 1 ranks"):
        planned(dense_steps=10)
    machine(1, 60e9)
    alone = planned(mode="dense")
    assert alone.run.weights == "resident"
    assert alone.mesh.reason.startswith("planned: dense autocast")


@pytest.mark.parametrize(
    ("memory", "values", "message"),
    [
        (30e9, {"dense_steps": 10}, "needs 56.4 GB for its dense phase, with 8 x 1,024"),
        (30e9, {"mode": "dense"}, "needs 56.4 GB for its dense phase"),
        (30e9, {"method": "gradual", "dense_steps": 10}, "for its dense phase"),
        (30e9, {}, "needs 3.* GB at the start"),
        (30e9, {"checkpointing": True}, ""),
        (30e9, {"masks": Path("/m")}, ""),
        (8e9, {"masks": Path("/m")}, "needs 11.1 GB at the start"),
        (24e9, {"pipe": 2, "dense_steps": 10}, "needs 2.* for each rank"),
        (30e9, {"pipe": 2, "dense_steps": 10}, ""),
    ],
    ids=str,
)
def test_a_model_without_room_is_refused(machine, memory, values, message) -> None:
    machine(1, memory)
    one = resolve(config(**{**BIG, "vocab_size": 50_304, **values}))
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_memory(one, 1)


def test_a_resumed_run_is_planned_again_for_its_ranks(machine) -> None:
    machine(2, 4e9)
    before = planned(shard="none")
    assert before.mesh.pipe > 1
    machine(1, 141e9)
    after = resolve_resumed(before, again(before))
    assert (after.mesh.pipe, after.run.weights) == (1, "resident")
    assert after.mesh.shard == "none"
    assert after.optim == before.optim
    assert after.model == before.model
    assert after.mesh.reason != before.mesh.reason
    machine(2, 4e9)
    same = resolve_resumed(before, again(before))
    assert same.run == before.run
    assert same.mesh.micro_batches == before.mesh.micro_batches
    assert same.mesh.pipe == before.mesh.pipe
    by_hand = with_values(before, plan=False, planned=())
    assert again(by_hand).mesh.pipe == before.mesh.pipe


def test_the_vocabulary_is_known_or_guessed(text: Path) -> None:
    assert planning._vocab_size(resolve(small(text))) == 256
    tokens = small(Path("/a.bin"))
    assert planning._vocab_size(resolve(tokens)) == 50_304
    assert planning._vocab_size(resolve(with_values(tokens, vocab_size=77))) == 77


FLAGS = (
    "--plan --steps 3 --batch-size 4 --num-layers 2 --width 32 --num-heads 2 --context 32 "
    "--eval-every 1000 --eval-batches 1 --dense-steps 1 --sample-tokens 0 --device cpu"
)


def test_the_command_line_says_what_and_why_and_records_it(text: Path, tmp_path, type_in) -> None:
    out = tmp_path / "run"
    assert "planned: resident, exact: " in type_in(f"train {text} {FLAGS} --out {out}").out
    mesh = json.loads((out / "run.json").read_text())["config"]["mesh"]
    assert mesh["plan"] is True
    assert mesh["planned"] == ["checkpointing", "pipe", "shard", "state", "weights"]
    assert mesh["reason"].startswith("planned: resident, exact")
    assert "planned: resident, exact" in type_in(f"train --resume {out} --steps 4").out


@pytest.mark.slow
def test_ranks_of_a_launch_plan_the_same_and_resume_alone(text: Path, tmp_path) -> None:
    out = tmp_path / "run"
    python, environment = [sys.executable, "-m", "samo"], {**os.environ, "OMP_NUM_THREADS": "1"}
    launched = [*python, "launch", "-n", "2", "train", str(text), *FLAGS.split(), "--out", str(out)]
    for command in (launched, [*python, "train", "--resume", str(out), "--steps", "4"]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("planned: ") == 1
    assert json.loads((out / "run.json").read_text())["ranks"] == {"pipe": 1, "data": 1}
