"""Predicted memory and time against steps measured on an H200, and against the simulator."""

import json
import time
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings, strategies as st

from samo.models.shapes import GPTConfig
from samo.planner.cost import all_gather_s, all_reduce_s, pipeline_s, step_time
from samo.planner.hardware import HARDWARE, Cluster
from samo.planner.memory import Job, Layout, peak
from samo.planner.network import gpt, named, sparsities
from samo.planner.simulator import simulate, simulate_step

RESULTS: Final = Path(__file__).parents[2] / "benchmarks" / "results"
H200: Final = Cluster(hardware=HARDWARE["h200"])
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "dense": {"scheme": "dense"},
    "autocast": {"scheme": "autocast"},
    "flashoptim": {"scheme": "8-bit"},
    "samo": {},
    "lean": {"state": "lean"},
    "streamed": {"weights": "streamed"},
    "streamed-lean": {"weights": "streamed", "state": "lean"},
}
EARLIER: Final = "streamed-h200"
"""Rows from a tree in which the 16-bit copies of unpruned parameters were streamed too."""


def measured() -> list[Any]:
    found: list[Any] = []
    for path in sorted(RESULTS.glob("st*h200*/rows.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            is_eager = row["parameters"].get("compile", "none") == "none"
            if row["bench"] == "step" and row["name"] in LAYOUTS and is_eager and row["median"]:
                found.append(
                    pytest.param(path.parent.name, row, id=f"{path.parent.name}-{len(found)}")
                )
    return found


def predicted(row: dict[str, Any]) -> tuple[Job, Layout]:
    about = row["parameters"]
    config = named(about["shape"])
    blocks = [layer for layer in config.layers if layer.attention_width]
    network = gpt(
        GPTConfig(
            num_layers=len(blocks), width=config.width, num_heads=1, context=about["context"],
            vocab_size=config.vocab_size,
        )
    )  # fmt: skip
    assert network.num_params == about["num_params"]
    sparsity = tuple(sparsities(about["sparsity"]).items())
    batch = about["batch_size"]
    job = Job(network=network, sparsity=sparsity, batch=batch, context=about["context"])
    is_checkpointed = about["checkpointed"]
    layout = Layout(micro_batch=batch, checkpointing=is_checkpointed, **LAYOUTS[row["name"]])
    return job, layout


@pytest.mark.parametrize(("folder", "row"), measured())
def test_state_and_peak_are_those_of_an_h200(folder: str, row: dict[str, Any]) -> None:
    memory = peak(*(found := predicted(row)))
    correction = 0.0
    is_old = folder.startswith(EARLIER) and row["figures"]["state_bytes_per_param"] != 2.8906
    if is_old and "streamed" in row["name"] and found[1].state == "exact":
        correction = memory.state["dense"]  # copies of what is not pruned
    if row["name"] != "flashoptim":  # which keeps small tensors in fp32
        state = memory.state_bytes - correction
        assert state == pytest.approx(row["figures"]["state_bytes"], rel=0.01)
    assert memory.peak_bytes - correction == pytest.approx(row["figures"]["peak_bytes"], rel=0.03)


def test_a_step_takes_as_long_as_on_an_h200() -> None:
    fastest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for _, row in (param.values for param in measured()):
        about = row["parameters"]
        key = (row["name"], about["shape"], about["batch_size"])
        # The same step took up to 1.5 times as long in other rounds, where the host is the limit.
        fastest[key] = min(fastest.get(key, row), row, key=lambda one: one["median"])
    assert len(fastest) > 12
    errors = {}
    for key, row in fastest.items():
        error = step_time(*predicted(row), H200).total * 1e3 / row["median"] - 1
        is_loose = key[0] == "autocast" or key[1] == "gpt3-350m"  # its casts; its host
        assert abs(error) < (0.17 if is_loose else 0.06), (key, error)
        errors[key] = abs(error)
    assert sum(errors.values()) / len(errors) < 0.04


# Links


def test_an_all_reduce_is_bound_by_the_link_of_a_node() -> None:
    cluster = Cluster(hardware=HARDWARE["a100-80"], num_gpus=64)
    inside = all_reduce_s(1e9, cluster, 8)
    assert inside == pytest.approx(2 * 7 / 8 * 1e9 / (0.8 * 300e9), rel=0.01)
    across = all_reduce_s(1e9, cluster, 64)
    assert (
        2 * 7 / 8 * 1e9 / (0.8 * 200e9) < across < inside + 2 * 7 / 8 * 1e9 / (0.8 * 200e9) + 1e-3
    )
    assert all_reduce_s(1e9, cluster, 8, groups=1) < all_reduce_s(1e9, cluster, 16, groups=4)
    assert all_reduce_s(1e9, cluster, 1) == 0
    assert all_gather_s(1e9, cluster, 64) == across / 2


# The simulator


@settings(max_examples=100, deadline=None)
@given(
    times=st.lists(st.floats(0.8, 1.25), min_size=1, max_size=8),
    count=st.integers(1, 24),
    link=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_the_closed_form_of_a_pipeline_is_near_the_simulator(times, count, link) -> None:
    # Passes of uneven stages may overlap more than it knows, and the engine's order is not ideal.
    line = simulate(
        len(times),
        count,
        duration=lambda stage, what, number: times[stage] * (1 if what == "forward" else 2) / 3,
        delay=lambda source, target: link,
    )
    assert 0.85 < line.span / pipeline_s(times, link, count) < 1.35


def test_without_links_and_with_even_stages_they_are_equal() -> None:
    assert simulate(4, 12).span == pytest.approx(pipeline_s([3.0] * 4, 0.0, 12))


def test_a_link_sends_one_message_after_the_other() -> None:
    free = simulate(2, 8, duration=lambda *_: 0.1, delay=lambda *_: 1.0, in_flight=8).span
    busy = simulate(2, 8, duration=lambda *_: 0.1, occupied=lambda *_: 1.0, in_flight=8).span
    assert free < 4
    assert busy > 8


def job_13b(batch: int) -> Job:
    sparsity = tuple(sparsities(0.9).items())
    return Job(network=named("gpt3-13b"), sparsity=sparsity, batch=batch, context=2048)


@pytest.mark.parametrize("schedule", ["message-driven", "1f1b"])
def test_2048_gpus_are_simulated_in_seconds(schedule) -> None:
    cluster = Cluster(hardware=HARDWARE["v100-16"], num_gpus=2048)
    layout = Layout(pipe=32, data=64, checkpointing=True)
    began = time.perf_counter()
    found = simulate_step(job_13b(2048), layout, cluster, schedule=schedule)
    assert time.perf_counter() - began < 10
    assert found.total_s == pytest.approx(step_time(job_13b(2048), layout, cluster).total, rel=0.05)
    assert found.timeline.peak_in_flight(0) <= 32


def test_jitter_makes_a_step_longer_the_more_replicas_wait_for_each_other() -> None:
    cluster = Cluster(hardware=HARDWARE["a100-80"], num_gpus=64)
    layout, job = Layout(pipe=4, data=16, checkpointing=True), job_13b(256)
    even, one, all_ = (
        simulate_step(job, layout, cluster, jitter=jitter, replicas=replicas).total_s
        for jitter, replicas in ((0.0, 1), (0.3, 1), (0.3, 16))
    )
    assert even < one < all_
