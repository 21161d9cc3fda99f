"""The search against an exhaustive one, what must never get worse, and the choice of a layout."""

import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from samo.errors import ConfigError
from samo.models.shapes import GPTConfig
from samo.planner.cost import step_time
from samo.planner.hardware import HARDWARE, Cluster, Hardware, Link
from samo.planner.memory import Job, Layout, peak
from samo.planner.network import ENDS, gpt, named
from samo.planner.search import choose, evaluate, layouts, search

ROUND = 10**8
H200 = Cluster(hardware=HARDWARE["h200"])
JOB = Job(network=named("gpt3-2.7b").pruned(0.9), batch=4, context=2048)

jobs = st.builds(
    lambda layers, width, sparsity, batch, context: Job(
        network=gpt(
            GPTConfig(num_layers=layers, width=width, num_heads=1, context=4096, vocab_size=32000)
        ).pruned(sparsity),
        batch=batch,
        context=context,
    ),
    st.integers(1, 6),
    st.sampled_from([1024, 2048, 4096]),
    st.sampled_from([0.5, 0.8, 0.9]),
    st.integers(1, 9),
    st.sampled_from([512, 2048]),
)
machines = st.builds(
    lambda base, memory, node, bandwidth: replace(
        HARDWARE[base], memory_bytes=memory * 1e9, gpus_per_node=node,
        inter=Link(bandwidth=bandwidth, latency_s=1e-5),
    ),
    st.sampled_from(["rtx4090", "h100"]),
    st.floats(2.0, 30.0),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1e8, 1e9, 1e11]),
)  # fmt: skip


def exhaustive(job: Job, cluster: Cluster) -> tuple[bool, float]:
    """Return whether anything fits, and the fastest step, or else the least memory."""
    best: tuple[Any, ...] = (True, float("inf"))
    for pipe, data in itertools.product(range(1, cluster.num_gpus + 1), repeat=2):
        if pipe * data != cluster.num_gpus or pipe > len(job.network.layers) or data > job.batch:
            continue
        rows = -(-job.batch // data)
        sizes = {2**i for i in range(rows.bit_length()) if 2**i <= rows} | {rows}
        budgets = range(ROUND, int(cluster.hardware.memory_bytes), ROUND)
        for micro_batch, checkpointing, state, weights, shard in itertools.product(
            sizes,
            (False, True),
            ("exact", "lean"),
            ("resident", "streamed", *budgets),
            (False, True),
        ):
            if shard and (pipe > 1 or data == 1 or state == "lean" or weights != "streamed"):
                continue
            layout = Layout(
                pipe=pipe, data=data, micro_batch=micro_batch, checkpointing=checkpointing,
                state=state, weights=weights, shard=shard,
            )  # fmt: skip
            best = min(best, evaluate(job, layout, cluster).key[:2])
    return best  # type: ignore[return-value]


@settings(max_examples=12, deadline=None)
@given(job=jobs, hardware=machines, num_gpus=st.sampled_from([1, 2, 4]))
def test_the_first_option_is_the_best_of_all(job: Job, hardware: Hardware, num_gpus: int) -> None:
    cluster = Cluster(hardware=hardware, num_gpus=num_gpus)
    found = search(job, cluster)
    assume(found)
    is_bad, value = exhaustive(job, cluster)
    assert found[0].fits == (not is_bad)
    assert found[0].key[1] == pytest.approx(value, rel=1e-9)
    if is_bad:
        with pytest.raises(ConfigError, match="no layout that these settings allow fits on "):
            choose(job, cluster)
    else:
        best, _ = choose(job, cluster)
        assert best.fits
        assert best.time.total <= 1.02 * value


@settings(max_examples=60, deadline=None)
@given(
    job=jobs,
    hardware=machines,
    num_gpus=st.sampled_from([1, 2, 4, 8]),
    more=st.floats(1.0, 4.0),
    faster=st.floats(1.0, 20.0),
)
def test_more_memory_and_faster_links_never_give_a_slower_plan(
    job, hardware, num_gpus, more, faster
) -> None:
    def best(machine: Hardware) -> float:
        found = search(job, Cluster(hardware=machine, num_gpus=num_gpus))
        return found[0].time.total if found and found[0].fits else float("inf")

    def quick(link: Link) -> Link:
        return Link(bandwidth=link.bandwidth * faster, latency_s=link.latency_s / faster)

    before = best(hardware)
    larger = replace(hardware, memory_bytes=hardware.memory_bytes * more)
    assert best(larger) <= before * (1 + 1e-9)
    nearer = replace(hardware, intra=quick(hardware.intra), inter=quick(hardware.inter))
    assert best(nearer) <= before * (1 + 1e-9)


def test_13b_on_2048_gpus_is_planned_in_seconds() -> None:
    job = Job(network=named("gpt3-13b").pruned(0.9), batch=2048, context=2048)
    began = time.perf_counter()
    found = search(job, Cluster(hardware=HARDWARE["v100-16"], num_gpus=2048))
    assert time.perf_counter() - began < 5
    assert found[0].fits


def test_compressed_state_helps_most_where_links_are_slow() -> None:
    job = Job(network=named("gpt3-13b").pruned(0.9), batch=1024, context=2048)
    fast = HARDWARE["a100-40"]

    def gain(hardware: Hardware) -> float:
        cluster = Cluster(hardware=hardware, num_gpus=64)
        samo, dense = (search(job, cluster, scheme)[0] for scheme in ("samo", "dense"))
        assert samo.fits
        assert dense.fits
        return dense.time.total / samo.time.total

    ethernet = replace(fast, inter=Link(bandwidth=1.25e9, latency_s=5e-5))
    assert gain(ethernet) > 2 > gain(fast) > 0.9  # dense FSDP2 need not expand weights


def test_the_reason_says_what_a_plainer_layout_would_take() -> None:
    roomy, reason = choose(JOB, H200)
    assert roomy.layout == Layout(micro_batch=4)
    assert reason.startswith("resident, exact: ")
    assert reason.endswith("layouts that fit")
    tight, reason = choose(JOB, Cluster(hardware=replace(H200.hardware, memory_bytes=10e9)))
    assert tight.layout.checkpointing
    assert "; resident, exact takes " in reason
    assert reason.endswith("GB, too much")
    _, reason = choose(JOB, replace(H200, num_gpus=4), [Layout(pipe=2, data=2)])
    assert "2 x 2 (stages x replicas), resident, exact, micro-batches of 1: " in reason


def test_only_the_given_layouts_are_chosen_from() -> None:
    lean = (one for one in layouts(JOB, H200) if one.state == "lean" and one.checkpointing)
    found = choose(JOB, H200, lean)[0].layout
    assert (found.state, found.checkpointing) == ("lean", True)
    with pytest.raises(ConfigError, match="the smallest takes nothing of"):
        choose(JOB, H200, [])


@pytest.mark.parametrize("batch", [7, 9, 11, 12, 23, 36])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_layouts_take_the_batch_that_was_asked_for(gpus: int, batch: int) -> None:
    job = replace(JOB, batch=batch)
    found = set(layouts(job, replace(H200, num_gpus=gpus)))
    assert {own.pipe for own in found} == {1, 2, 4} - set(range(gpus + 1, 5))
    for own in found:
        count = own.micro_batches(job)
        if own.pipe > 1:  # the smallest share of a replica has a sequence for each
            assert batch // own.data >= count
        else:
            rows = -(-(batch // count) // own.data)  # of the largest share of a pass
            assert (batch % count, rows) == (0, own.micro_batch)


def test_a_frozen_embedding_has_neither_gradient_nor_state() -> None:
    frozen = replace(JOB, network=JOB.network.with_frozen(ENDS))
    numel = sum(m.numel for i in (0, -1) for m in JOB.network.layers[i].matrices)
    for state, trained in (("exact", 4 + 2 + 8 + 2), ("lean", 7 + 8 / 256)):
        layout = Layout(state=state, micro_batch=4, checkpointing=True)  # type: ignore[arg-type]
        before, after = peak(JOB, layout), peak(frozen, layout)
        saved = before.state_bytes - after.state_bytes
        assert saved == pytest.approx((trained - 2) * numel, rel=1e-6)
        assert after.peak_bytes < before.peak_bytes
        times = [step_time(job, layout, H200) for job in (JOB, frozen)]
        assert times[1].compute < times[0].compute
        assert times[1].optimizer < times[0].optimizer


def test_a_budget_for_all_weights_is_as_fast_as_resident_ones() -> None:
    for network in (JOB.network, JOB.network.with_frozen(ENDS)):
        resident, budget = (
            step_time(replace(JOB, network=network), Layout(weights=weights), H200)
            for weights in ("resident", 10**11)  # type: ignore[arg-type]
        )
        assert budget.expand_compress == resident.expand_compress


def test_what_is_pruned_cannot_be_frozen() -> None:
    with pytest.raises(ConfigError, match="head cannot be frozen and pruned"):
        JOB.network.pruned(0.9, {"head": 0.5}).with_frozen(ENDS)
