"""What the report says in numbers and sentences, and what it does not claim."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samo.report import findings
from samo.report.runs import Run, read_run, read_runs
from samo.train.events import Event
from tests.report.runs import (
    KEPT,
    NUM_PARAMS,
    accounted,
    evaluated,
    gradual,
    observed,
    pruned,
    remapped,
    stepped,
    write_events,
    write_run,
)

OTHER = {"data": {"fingerprint": "x"}, "hardware": {"device_name": "y"}}


def run_of(path: Path, *events: Event, **settings: Any) -> Run:
    return read_run(write_events(write_run(path, **settings), events))


def with_losses(folder: Path, **losses: float) -> list[Run]:
    return [run_of(folder / name, evaluated(9, losses[name]), name=name) for name in losses]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((2.331, 2.328, 2.2), "c reached the lowest validation loss, 2.200; the highest is 2.331"),
        ((2.1, 2.104, 2.2), "a and b reached the lowest validation loss, 2.100; the highest is"),
        (
            (2.1, 2.11, 2.115),
            "All runs end within 0.015 of each other: validation loss 2.100 to 2.115",
        ),
    ],
)
def test_losses_are_ranked_only_beyond_noise(
    tmp_path: Path, losses: tuple[float, ...], words: str
) -> None:
    runs = with_losses(tmp_path, **dict(zip("abc", losses)))
    assert findings.loss_finding(runs).startswith(words)


def test_other_data_hardware_and_steps_are_named(tmp_path: Path) -> None:
    (a,) = with_losses(tmp_path, a=2.0)
    other = run_of(tmp_path / "b", evaluated(9, 3.0), changes=OTHER)
    found = findings.loss_finding([a, other])
    assert found == "Validation losses from 2.000 to 3.000, on different texts"
    longer = run_of(tmp_path / "d", evaluated(99, 3.0))
    assert findings.loss_finding([a, longer]).endswith("(after different numbers of steps)")
    fast = run_of(tmp_path / "e", stepped(1, tokens_per_s=900), changes=OTHER)
    slow = run_of(tmp_path / "f", stepped(1, tokens_per_s=800))
    assert findings.throughput_finding([fast, slow]) == "800 to 900 tokens/s, on different hardware"


def test_the_loss_before_pruning_is_not_the_one_right_after(tmp_path: Path) -> None:
    events = [evaluated(40, 2.6), pruned(40), evaluated(40, 2.7), stepped(90), evaluated(90, 2.5)]
    found = findings.loss_finding([run_of(tmp_path, *events)])
    assert found == "The validation loss is 2.500 at step 90; it was 2.600 before pruning"


def test_throughput_is_the_median_of_the_last_phase_without_its_first_line(tmp_path: Path) -> None:
    rates = [("dense", 900.0), ("samo", 1.0), ("samo", 50.0), ("samo", 60.0), ("samo", 80.0)]
    steps = [stepped(i, phase=p, tokens_per_s=rate) for i, (p, rate) in enumerate(rates)]
    run = run_of(tmp_path, *steps)
    assert findings.tokens_per_s(run) == 60.0
    assert findings.throughput_finding([run]) == "60 tokens/s"


def test_equal_baselines_are_shown_once(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{p}", name=f"r{p}", sparsity=p) for p in (0.8, 0.9)]
    labels = [bar.label for bar in findings.bars(read_runs(paths))]
    baselines = ["dense training", "SAMO paper, r0.8", "SAMO paper, r0.9"]
    assert labels == [*baselines, "r0.8, measured", "r0.9, measured"]
    assert [bar.label for bar in findings.bars(read_runs(paths[:1]))][1:] == [
        "SAMO paper",
        "samo, measured",
    ]


def test_a_prediction_is_shown_if_it_differs(tmp_path: Path) -> None:
    state = replace(accounted(1), measured_bytes=7, measured={"values": 7})
    found = findings.bars([run_of(tmp_path, pruned(1), state)])
    assert [bar.label for bar in found[2:]] == ["samo, predicted", "samo, measured"]
    assert [bar.total for bar in found[2:]] == [state.predicted_bytes, 7]
    assert [bar.place for bar in found[2:]] == [None, 0]


def test_a_diverged_run_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path, changes={"data": {"vocab_size": 256}})
    for last, words in {
        5.6: "",
        56.0: "it diverged: the validation loss is 56.000, and guessing gives 5.545; lower --lr",
        math.nan: "it diverged: the validation loss is NaN; lower --lr",
    }.items():
        run = read_run(write_events(path, [stepped(8), evaluated(9, last)]))
        assert findings.warnings(run).startswith(words)
        assert bool(words) == bool(findings.warnings(run))
    # A model that was worse before has not diverged.
    events = [stepped(8), evaluated(0, 17.9), evaluated(9, 17.8)]
    assert findings.warnings(read_run(write_events(path, events))) == ""
    events = [stepped(8), evaluated(0, 4.5), evaluated(9, 4.6)]
    found = findings.warnings(read_run(write_events(path, events)))
    assert found == "the validation loss is higher than before training, 4.500; lower --lr"


def test_runs_that_hold_the_same_are_not_ranked(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / name, accounted(1), name=name) for name in ("a", "b")]
    assert findings.memory_finding(runs) == "a and b hold 5.82 MB, dense training 13.9 MB"
    assert findings.memory_finding(runs[:1]) == "a holds 5.82 MB, dense training 13.9 MB"


def test_the_state_of_several_ranks_says_where_it_is(tmp_path: Path) -> None:
    sizes = (3_000_000, 3_000_000, 2_816_112, 2_816_112)
    mesh = {"ranks": {"pipe": 2, "data": 2}}
    run = read_run(write_run(tmp_path / "a", rank_bytes=sizes, changes=mesh))
    where = "5.82 MB in 2 stages together"
    assert findings.memory_finding([run]) == f"samo holds {where}, dense training 13.9 MB"
    assert (
        findings.held(run)
        == f"{where}, 58.1 % less than dense training (16.0 B/param), largest rank 3.00 MB"
    )
    assert findings.ranks(run) == "4 ranks: 2 stages x 2 replicas"
    mesh = {"ranks": {"data": 2}}
    run = read_run(write_run(tmp_path / "b", rank_bytes=sizes[:2], changes=mesh))
    assert (
        findings.held(run) == "5.82 MB on each rank, 58.1 % less than dense training (16.0 B/param)"
    )
    assert "on 2 ranks: 2 replicas" in findings.summary([run])
    assert findings.bytes_per_param(run) == pytest.approx(5_816_112 / NUM_PARAMS)


def test_early_bird_says_when_and_why_it_pruned(tmp_path: Path) -> None:
    apart = "distance 0.180, threshold 0.1"
    for reason, words in {
        "settled": "Masks settled at step 100",
        "limit": "Masks had not settled by the limit, step 100",
    }.items():
        run = read_run(write_run(tmp_path / reason, reason=reason, more=observed(10)))
        assert findings.ticket_finding(run) == f"{words}: {apart}"
    for count, words in {1: "threshold 0.1", 2: "distance 0.220, threshold 0.1"}.items():
        run = run_of(tmp_path / f"{count}", *observed(count))
        assert findings.ticket_finding(run) == f"Masks have not settled yet: {words}"


def test_changes_of_masks_are_counted(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", sparsity=0.0, more=gradual()))
    found = findings.change_finding(run)
    assert found == "Masks were pruned further 3 times, to 90 % sparsity at step 250"
    assert "90 % sparse, pruned in steps 100 to 250" in findings.summary([run])
    moves = [remapped(step, KEPT, KEPT, KEPT // 4) for step in (150, 200)]
    run = read_run(write_run(tmp_path / "b", more=moves))
    text = "replacing 25 % of the kept weights at first and 25 % at step 200"
    assert findings.change_finding(run) == f"Masks changed 2 times, {text}"
