"""What the report says in numbers and sentences, and what it does not claim."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samo.report import findings
from samo.report.memory_bars import bars, dense_kinds, paper_kinds
from samo.report.runs import Run, read_run, read_runs
from samo.train.events import Event
from tests.report.runs import (
    KEPT,
    NUM_PARAMS,
    NUMEL,
    UNPRUNED,
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


def run_of(path: Path, *events: Event, **settings: Any) -> Run:
    return read_run(write_events(write_run(path, **settings), events))


def with_losses(folder: Path, losses: dict[str, float], **settings: Any) -> list[Run]:
    return read_runs(
        [
            write_events(
                write_run(folder / name, name=name, **settings), [evaluated(9, losses[name])]
            )
            for name in losses
        ]
    )


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (
            {"samo": 2.331, "lean": 2.328, "dense": 2.2},
            "dense has the lowest validation loss, 2.200; samo and lean the highest, about 2.33",
        ),
        (
            {"samo": 2.100, "lean": 2.104, "dense": 2.2},
            "samo and lean have the lowest validation loss, about 2.10; dense the highest, 2.200",
        ),
        (
            {"samo": 2.100, "lean": 2.115},
            "All runs reach about the same validation loss, 2.100 to 2.115",
        ),
        (
            {"a": 2.0, "between": 2.03, "c": 2.06},
            "a has the lowest validation loss, 2.000; c the highest, 2.060",
        ),
        ({"a": 2.1, "b": 2.1}, "All runs reach about the same validation loss, 2.100"),
    ],
)
def test_losses_are_ranked_only_beyond_noise(
    tmp_path: Path, losses: dict[str, float], words: str
) -> None:
    assert findings.loss_finding(with_losses(tmp_path, losses)) == words


def test_what_does_not_compare_is_not_ranked(tmp_path: Path) -> None:
    a, _ = with_losses(tmp_path, {"a": 2.0, "b": 3.0})
    other = {"data": {"fingerprint": "x"}, "hardware": {"device_name": "y"}}
    (b,) = with_losses(tmp_path / "c", {"b": 3.0}, changes=other)
    assert (
        findings.loss_finding([a, b]) == "Validation losses from 2.000 to 3.000, of different texts"
    )
    rows = {quantity.name: quantity.row([a, b]) for quantity in findings.QUANTITIES}
    assert rows["validation loss"] == [("2.000", False), ("3.000", False)]
    longer = run_of(tmp_path / "d", evaluated(99, 3.0))
    assert findings.loss_finding([a, longer]).endswith("(after different numbers of steps)")
    fast = run_of(tmp_path / "e", stepped(1, tokens_per_s=900), changes=other)
    slow = run_of(tmp_path / "f", stepped(1, tokens_per_s=800))
    assert findings.throughput_finding([fast, slow]) == "800 to 900 tokens/s, on different hardware"


def test_the_loss_before_pruning_is_told_from_that_right_after(tmp_path: Path) -> None:
    events = [evaluated(40, 2.6), pruned(40), evaluated(40, 2.7), evaluated(90, 2.5)]
    assert (
        findings.loss_finding([run_of(tmp_path, *events)])
        == "At 90 % sparsity the validation loss reaches 2.500; it was 2.600 before pruning"
    )


def test_throughput_is_the_median_of_the_last_phase_without_its_first_line(tmp_path: Path) -> None:
    rates = [("dense", 900.0), ("samo", 1.0), ("samo", 50.0), ("samo", 60.0), ("samo", 80.0)]
    steps = [stepped(i, phase=p, tokens_per_s=rate) for i, (p, rate) in enumerate(rates)]
    run = run_of(tmp_path, *steps)
    assert findings.tokens_per_s(run) == 60.0
    assert findings.throughput_finding([run]) == "60 tokens/s"
    near = run_of(tmp_path, stepped(1, tokens_per_s=62.0))
    assert findings.throughput_finding([run, near]) == "About the same speed: 60 to 62 tokens/s"


def test_the_training_loss_is_a_mean_over_the_end(tmp_path: Path) -> None:
    run = run_of(tmp_path, *(stepped(i, loss=float(i > 98)) for i in range(1, 101)))
    assert findings.last_loss(run) == 1.0
    assert math.isnan(findings.last_loss(run_of(tmp_path, stepped(1, loss=math.nan))))


def test_the_best_of_a_row_are_those_within_the_tolerance(tmp_path: Path) -> None:
    rates = (100.0, 97.0, 50.0, math.nan)
    runs = [run_of(tmp_path / f"{r}", stepped(1, tokens_per_s=r)) for r in rates]
    rows = {quantity.name: quantity.row(runs) for quantity in findings.QUANTITIES}
    assert rows["tokens/s"] == [("100", True), ("97", True), ("50", False), ("-", False)]
    assert rows["model state"] is None
    alone = findings.QUANTITIES[2].row(runs)
    assert alone == [("1", False)] * 4


# Memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_parts_of_the_baselines_add_up(tmp_path: Path, dtype: str) -> None:
    run = read_run(write_run(tmp_path, dtype=dtype))
    assert run.state is not None
    dense, paper = dense_kinds(run, run.state), paper_kinds(run, run.state)
    assert sum(dense.values()) == run.state.dense_bytes
    assert sum(paper.values()) == run.state.paper_bytes
    assert "whole" not in {**dense, **paper}
    assert paper["bitmap"] == 4 * KEPT
    assert paper["moments"] == 8 * (KEPT + UNPRUNED)


def test_baselines_are_shown_once_and_name_their_run_where_they_differ(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{p}", name=f"r{p}", sparsity=p) for p in (0.8, 0.9)]
    labels = [bar.label for bar in bars(read_runs(paths))]
    baselines = ["dense training", "SAMO paper, r0.8", "SAMO paper, r0.9"]
    assert labels == [*baselines, "r0.8, measured", "r0.9, measured"]
    assert [bar.label for bar in bars(read_runs(paths[:1]))][1:] == ["SAMO paper", "samo, measured"]


def test_a_prediction_is_shown_where_it_differs_and_parts_only_if_they_add_up(
    tmp_path: Path,
) -> None:
    state = replace(accounted(1), dense_bytes=7, paper_bytes=7, measured_bytes=7)
    found = bars([run_of(tmp_path, pruned(1), state)])
    assert [bar.kinds for bar in found[:2]] == [{"whole": 7}] * 2
    assert [bar.label for bar in found[2:]] == ["samo, predicted", "samo, measured"]
    assert [bar.total for bar in found[2:]] == [state.predicted_bytes, 7]
    assert [bar.place for bar in found[2:]] == [None, 0]


def test_a_run_before_pruning_is_not_called_samo(tmp_path: Path) -> None:
    paths = [write_events(write_run(tmp_path), [accounted(1)])]
    assert (
        findings.memory_finding(read_runs(paths)) == "notes holds 5.82 MB, dense training 13.9 MB"
    )


def test_state_of_several_ranks_says_where_it_is(tmp_path: Path) -> None:
    sizes = (3_000_000, 3_000_000, 2_816_112, 2_816_112)
    mesh = {"ranks": {"pipe": 2, "data": 2}}
    run = read_run(write_run(tmp_path / "a", rank_bytes=sizes, changes=mesh))
    where = "5.82 MB in 2 stages together"
    assert findings.memory_finding([run]) == f"samo holds {where}, dense training 13.9 MB"
    assert findings.held(run) == f"{where}, 58.1 % less than dense training, largest rank 3.00 MB"
    assert findings.ranks(run) == "4 ranks: 2 stages x 2 replicas"
    mesh = {"ranks": {"data": 2}}
    run = read_run(write_run(tmp_path / "b", rank_bytes=sizes[:2], changes=mesh))
    assert findings.held(run) == "5.82 MB on each rank, 58.1 % less than dense training"
    assert "on 2 ranks: 2 replicas" in findings.summary([run])
    assert findings.bytes_per_param(run) == pytest.approx(5_816_112 / NUM_PARAMS)


# Masks


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("settled", ": the last 5 masks agree, distance 0.180 at most, threshold 0.1"),
        ("limit", ", the limit: masks had not settled, distance 0.180, threshold 0.1"),
    ],
)
def test_the_ticket_says_when_and_why_it_was_drawn(tmp_path: Path, reason: str, words: str) -> None:
    run = read_run(write_run(tmp_path, reason=reason, more=observed(10)))
    assert findings.ticket_finding(run) == f"The ticket was drawn at step 100{words}"


@pytest.mark.parametrize(("count", "words"), [(1, "one look so far"), (2, "distance 0.220")])
def test_a_ticket_that_is_not_drawn_says_how_far_it_is(
    tmp_path: Path, count: int, words: str
) -> None:
    run = run_of(tmp_path, *observed(count))
    assert findings.ticket_finding(run) == f"Masks have not settled so far: {words}, threshold 0.1"


def test_changes_of_masks_are_counted(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", sparsity=0.0, more=gradual()))
    assert findings.change_finding(run) == "3 changes of the masks, to 90 % sparsity at step 250"
    assert "pruned to 90 % sparsity from step 100 to 250" in findings.summary([run])
    moves = [remapped(step, KEPT, KEPT, KEPT // 4) for step in (150, 200)]
    replaced = "of the masks replaced 25 % of the kept weights"
    run = read_run(write_run(tmp_path / "b", more=moves[:1]))
    assert findings.change_finding(run) == f"1 change {replaced}"
    run = read_run(write_run(tmp_path / "b", more=moves))
    assert findings.change_finding(run) == f"2 changes {replaced} at first and 25 % at step 200"


def test_sparsity_of_tensors_names_the_extremes() -> None:
    sizes = {"a": (10, 100), "b": (11, 100), "c": (NUMEL // 8, NUMEL)}
    assert findings.density_finding(sizes) == "Sparsity runs from 87.5 % in c to 90 % in a"
    assert findings.density_finding({"a": (1, 4)}) == "All pruned tensors are 75 % sparse"
