"""The deciding half of data parallelism, without other ranks: sizes, buckets, counts, predictions."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

import samo
from samo.memory.predict import TensorSpec, predict, total
from samo.parallel.collectives import _add_up
from samo.parallel.layout import BucketPlan, Tensor1D, plan_buckets
from samo.parallel.mesh import check_sizes, gpu_of, join
from samo.parallel.traffic import TrafficMeter, sent_bytes

# The mesh


@given(st.integers(1, 6), st.integers(1, 6))
def test_the_missing_size_is_found(pipe: int, data: int) -> None:
    ranks = pipe * data
    assert check_sizes({"pipe": pipe, "data": None}, ranks) == {"pipe": pipe, "data": data}
    assert check_sizes({"pipe": pipe, "data": data}, ranks) == {"pipe": pipe, "data": data}


def test_sizes_that_do_not_fit_are_refused_with_those_that_do() -> None:
    fitting = (
        "does not make up 4 ranks; these do: pipe=1 x data=4, pipe=2 x data=2, pipe=4 x data=1"
    )
    with pytest.raises(ValueError, match=f"pipe=3 x data=2 {fitting}"):
        check_sizes({"pipe": 3, "data": 2}, 4)
    with pytest.raises(ValueError, match=f"pipe=3 {fitting}"):
        check_sizes({"pipe": 3, "data": None}, 4)
    with pytest.raises(ValueError, match="pipe=2 does not make up 1 rank; these do"):
        samo.mesh(pipe=2)
    assert not dist.is_initialized()  # nothing was begun
    with pytest.raises(ValueError, match="data must be 1 or more, got 0"):
        samo.mesh(data=0)
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'tpu'"):
        samo.mesh(device="tpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s must be over 0, got 0"):
        samo.mesh(timeout_s=0)


@given(st.integers(1, 8), st.integers(1, 8))
def test_ranks_share_gpus_evenly_and_without_nccl_where_there_are_too_few(
    num_local: int, num_gpus: int
) -> None:
    places = [gpu_of(rank, num_local, num_gpus) for rank in range(num_local)]
    loads = [[index for index, _ in places].count(gpu) for gpu in range(num_gpus)]
    assert sum(loads) == num_local
    assert max(loads) - min(loads) <= 1
    assert {backend for _, backend in places} == {"gloo" if max(loads) > 1 else "nccl"}


def test_a_shared_gpu_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    backends: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: backends.append(backend))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for local_rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        join("cuda", timedelta(seconds=1), None)
    (message,) = caplog.messages
    assert message.startswith("2 ranks share 1 GPU and talk over gloo")
    assert (chosen, backends) == ([0, 0], ["gloo", "gloo"])


def test_a_mesh_reads_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in {**settings, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    try:
        first, second = samo.mesh(device="cpu"), samo.mesh(pipe=1, data=1, device="cpu")
        assert first["data"].size() == second["pipe"].size() == 1
    finally:
        dist.destroy_process_group()


def test_many_meshes_on_many_ranks() -> None:
    """512 ranks that exist on paper alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=11, world_size=512)
    try:
        wide, deep = samo.mesh(device="cpu"), samo.mesh(pipe=8, device="cpu")
        assert tuple(wide.shape) == (1, 512)
        assert tuple(deep.shape) == (8, 64)
        assert deep["data"].get_local_rank() == 11
        assert deep["pipe"].get_local_rank() == 0
    finally:
        dist.destroy_process_group()


# Buckets

tensors = st.lists(
    st.builds(
        lambda size, kind: (size, kind),
        st.integers(0, 50),
        st.sampled_from(["bf16", "fp32"]),
    ),
    min_size=1,
    max_size=20,
).map(
    lambda rows: [
        Tensor1D(f"w{i}", size, 2 if kind == "bf16" else 4, kind)
        for i, (size, kind) in enumerate(rows)
    ]
)


@given(tensors, st.floats(1, 500), st.integers(1, 7))
def test_every_weight_lies_in_one_bucket_and_has_one_owner(
    rows: list[Tensor1D], bucket_bytes: float, num_ranks: int
) -> None:
    plans = plan_buckets(rows, bucket_bytes=bucket_bytes, num_ranks=num_ranks)
    by_name = {row.name: row for row in rows}
    assert sorted(name for plan in plans for name in plan.names) == sorted(by_name)
    for plan in plans:
        members = [by_name[name] for name in plan.names]
        assert len({row.kind for row in members}) == 1
        assert plan.size % num_ranks == 0
        assert 0 <= plan.size - plan.starts[-1] < num_ranks
        size = sum(row.size * row.item_bytes for row in members)
        assert size <= bucket_bytes or len(members) == 1
        for index, row in enumerate(members):
            start, stop = plan.range_of(index)
            assert stop - start == row.size
            parts = [plan.owned(index, rank) for rank in range(num_ranks)]
            owners = [rank for rank, (a, b) in enumerate(parts) for _ in range(a, b)]
            assert owners == [(start + i) // plan.chunk for i in range(row.size)]
    order = [name for plan in plans for name in plan.names]
    for kind in ("bf16", "fp32"):  # gradients come from the last weight to the first
        expected = [row.name for row in reversed(rows) if row.kind == kind]
        assert [name for name in order if by_name[name].kind == kind] == expected


def test_the_example_of_the_layout() -> None:
    rows = [Tensor1D(n, s, 2, "") for n, s in (("c", 5), ("b", 2), ("a", 5))]
    (plan,) = plan_buckets(rows, bucket_bytes=100, num_ranks=3)
    assert plan == BucketPlan(("a", "b", "c"), (0, 5, 7, 12), 12, 3)
    assert [plan.owned(i, 1) for i in range(3)] == [(4, 5), (0, 2), (0, 1)]


# Sums


@given(st.integers(1, 5), st.sampled_from([0, 1, 1000, 2**16 + 3]), st.sampled_from([1, 2, 3, 5]))
def test_rows_are_added_up_in_fp32_and_rounded_once(
    num_ranks: int, size: int, divisor: int
) -> None:
    rows = torch.randn(num_ranks, size, generator=torch.Generator().manual_seed(size)).bfloat16()
    out = torch.empty(size, dtype=torch.bfloat16)
    _add_up(rows, out, divisor)
    total = torch.zeros(size)
    for row in rows:
        total += row.float()
    assert torch.equal(out, (total / divisor).bfloat16())


# Counts


def test_bytes_are_counted_by_the_usual_algorithms() -> None:
    assert sent_bytes("all_reduce", 100, 4) == 150
    assert sent_bytes("reduce_scatter", 100, 4) == sent_bytes("all_gather", 100, 4) == 75
    assert sent_bytes("broadcast", 100, 4) == 100
    assert sent_bytes("all_reduce", 100, 1) == 0


def test_time_in_flight_is_that_of_the_union() -> None:
    meter = TrafficMeter(2)
    meter.count("gradients", "all_reduce", 100, 60)
    for now, is_begin in ((1.0, True), (2.0, True), (4.0, False), (5.0, False), (7.0, True)):
        (meter.begin if is_begin else meter.end)(now)
    meter.end(9.0)
    found = meter.read()
    assert found.in_flight_s == 6.0
    assert found.gradients == samo.TrafficOf(
        calls=1, argument_bytes=100, pruned_bytes=60, sent_bytes=100
    )
    assert found.sent_bytes == 100
    meter.restart_clock()
    assert meter.read().in_flight_s == 0.0


# Predictions


def test_sharded_state_is_predicted_by_the_formula() -> None:
    spec = TensorSpec(numel=2**20, kept=2**17)
    whole, part = predict(spec), predict(spec, replicas=4, shard="state")
    assert predict(spec, replicas=4) == whole
    assert predict(spec, replicas=1, shard="state") == whole
    assert {kind: part[kind] for kind in ("weights", "bitmap", "gradients")} == {
        kind: whole[kind] for kind in ("weights", "bitmap", "gradients")
    }
    assert part["moments"] == whole["moments"] // 4
    assert part["rest"] == 4 * 2**17 // 4
    lean = TensorSpec(numel=2**20, kept=2**17, is_lean=True)
    assert predict(lean, replicas=4, shard="state")["moments"] == 2 * (2**15 + 4 * 2**15 // 256)
    frozen = TensorSpec(numel=2**20, kept=2**17, is_trained=False)
    assert total([frozen], replicas=4, shard="state") == total([frozen])
    with pytest.raises(ValueError, match="replicas must be 1 or more, got 0"):
        predict(spec, replicas=0)
    with pytest.raises(ValueError, match="shard must be None or 'state', got 'all'"):
        predict(spec, shard="all")  # type: ignore[arg-type]
