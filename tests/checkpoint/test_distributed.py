"""Checkpoints of many ranks: from any layout into any other, and a failure anywhere raised everywhere."""

import copy
import errno
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import samo
from samo import checkpoint
from samo.checkpoint import distributed, load, tensors
from samo.checkpoint.save import merge
from samo.errors import CheckpointError, PeerError
from samo.utils import atomic_io
from tests.checkpoint.cases import Case, Layout, Run, contents, draw
from tests.ranks import run_ranks

HALF = Case(torch.bfloat16)
TIED = Case(torch.bfloat16, is_tied=True)
PAIRS = {
    3: ((Case(torch.bfloat16, "sgd"), Layout(1, 3)), (TIED, Layout(3, 1))),
    4: (
        (TIED, Layout(2, 2)),
        (TIED, Layout(4, 1)),
        (Case(torch.float32, "both"), Layout(2, 2)),
        (Case(torch.bfloat16, "lean"), Layout(2, 2)),
        (Case(), Layout(2, 2, 2)),
    ),
}
"""By number of ranks: what is saved from and loaded into which layout."""


def quick_disk() -> None:
    os.fsync = lambda file: None  # type: ignore[assignment]


def reference(case: Case, path: Path) -> None:
    """Write what one process would."""
    run = Run(case, None)
    run.train(1)
    run.randomise()
    samo.save(path, run.pipeline, run.opts, extra={"step": 3, "seeds": torch.arange(3)})
    run.close()


def differing(path: Path, expected: Path) -> list[str]:
    """Return what is not the same in two checkpoints."""
    checkpoint.verify(path)
    a, b = contents(path), contents(expected)
    return [f"{path.name} {name}" for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


# Any layout


def save_and_load(rank: int, num_ranks: int, folder: Path) -> list[str]:
    """Save each case in its layout, and load what one process saved; return what differs."""
    quick_disk()
    wrong = []
    for case, layout in PAIRS[num_ranks]:
        given = {"step": 3, "seeds": torch.arange(3)} if rank == 0 else {"other": rank}
        run = Run(case, layout)
        run.train(1)
        run.randomise()
        path = folder / f"{case.name}-{layout.name}"
        samo.save(path, run.pipeline, run.opts, extra=given)
        wrong += differing(path, folder / case.name) if rank == 0 else []
        run.close()
        run = Run(case, layout, samo.load_masks(path), seed=1)
        assert samo.load(folder / case.name, run.pipeline, run.opts)["step"] == 3
        samo.save(folder / "again", run.pipeline, run.opts, extra=given)
        wrong += differing(folder / "again", folder / case.name) if rank == 0 else []
        run.close()
        dist.barrier()
    return wrong


@pytest.mark.parametrize("num_ranks", PAIRS)
def test_every_layout_saves_and_loads_what_one_process_would(
    num_ranks: int, tmp_path: Path
) -> None:
    for case in {case for case, _ in PAIRS[num_ranks]}:
        reference(case, tmp_path / case.name)
    results = run_ranks(num_ranks, save_and_load, tmp_path, timeout_s=100)
    assert results == [[]] * num_ranks
    for case, layout in PAIRS[num_ranks]:  # and back into one process
        path = tmp_path / f"{case.name}-{layout.name}"
        run = Run(case, None, samo.load_masks(path), seed=1)
        assert samo.load(path, run.pipeline, run.opts)["step"] == 3
        samo.save(
            tmp_path / "again", run.pipeline, run.opts, extra={"step": 3, "seeds": torch.arange(3)}
        )
        assert differing(tmp_path / "again", tmp_path / case.name) == []
        run.close()


def resume(rank: int, num_ranks: int, folder: Path) -> list[str]:
    """Train, save, train; and from what was saved, train the same again."""
    quick_disk()
    wrong = []
    for case, layout in ((Case(torch.bfloat16, "lean"), Layout(1, 2)), (HALF, Layout(2, 1))):
        run = Run(case, layout)
        run.train(1)
        samo.save(folder / "middle", run.pipeline, run.opts)
        run.train(2)
        samo.save(folder / "end", run.pipeline, run.opts)
        run.close()
        run = Run(case, layout, samo.load_masks(folder / "middle"), seed=1)
        samo.load(folder / "middle", run.pipeline, run.opts)
        run.train(2)
        samo.save(folder / "again", run.pipeline, run.opts)
        run.close()
        wrong += differing(folder / "again", folder / "end")
        assert differing(folder / "middle", folder / "end"), "it has learnt something"
        dist.barrier()
    return wrong


def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    assert run_ranks(2, resume, tmp_path) == [[], []]


# Replicas of DistributedDataParallel


def wrapped(rank: int, num_ranks: int, folder: Path) -> None:
    """Save from DistributedDataParallel, with a sharded optimizer or not, and load into it again."""
    quick_disk()
    with warnings.catch_warnings(action="ignore"):  # torch's own, of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def build(seed: int, *, is_sharded: bool) -> tuple[DistributedDataParallel, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16))
        samo.compress_(model, samo.prune(model, 0.5, method="random", seed=1))
        ddp = DistributedDataParallel(model)
        if is_sharded:
            return ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
        return ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01)

    def step(ddp: DistributedDataParallel, opt: Any, seed: int) -> None:
        ddp(draw(f"{seed} {rank}", 16)).square().sum().backward()
        opt.step()
        opt.zero_grad()

    for is_sharded in (False, True):
        ddp, opt = build(0, is_sharded=is_sharded)
        step(ddp, opt, 0)
        if is_sharded:
            opt.consolidate_state_dict(to=0)
        samo.save(folder / "last", ddp, opt, extra={"step": 1})
        step(ddp, opt, 1)
        for other_sharded in (False, True):
            again, again_opt = build(2, is_sharded=other_sharded)
            samo.load(folder / "last", again, again_opt)
            step(again, again_opt, 1)
            for name, value in ddp.state_dict().items():
                assert torch.equal(value, again.state_dict()[name]), (name, other_sharded)
    dist.barrier()


def test_replicas_save_once_and_all_load(tmp_path: Path) -> None:
    run_ranks(2, wrapped, tmp_path)
    found = checkpoint.verify(tmp_path / "last")
    assert set(found.optimizers[0]["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all("-rank00000" in name for name in found.files)
    model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16))
    assert samo.load(tmp_path / "last", model) == {"step": 1}


# Rows of FSDP2

BATCH = 8


def build(sizes: tuple[int, ...] = ()) -> nn.Module:
    """Return a small model; with sizes of a mesh, sharded over its last axis and copied along the first."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5, bias=False)]
    model = nn.Sequential(*layers).double()
    if sizes:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "rows")[-len(sizes) :])
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def learn(model: nn.Module, opt: torch.optim.Optimizer, rows: slice, start: int, stop: int) -> None:
    """Take steps on this rank's rows of the batches; FSDP2 averages over equal parts."""
    for step in range(start, stop):
        x = draw(f"batch {step}", BATCH * 6).view(BATCH, 6).double()
        opt.zero_grad()
        model(x[rows]).square().mean().backward()
        opt.step()


def resume_sharded(rank: int, num_ranks: int, folder: Path, sizes: tuple[int, ...]) -> int:
    """Resume what one process began, save, and load that again; return the files that were read."""
    quick_disk()
    model = build(sizes)
    opt = optimizer(model)
    # Its root stays whole after a forward pass until a backward pass comes.
    model(torch.zeros(1, 6, dtype=torch.float64))
    assert samo.load(folder / "begun", model, opt) == {"step": 3}
    assert all(isinstance(s["exp_avg"], DTensor) for s in opt.state.values())
    learn(model, opt, slice(BATCH * rank // num_ranks, BATCH * (rank + 1) // num_ranks), 3, 5)
    model(torch.zeros(1, 6, dtype=torch.float64))
    samo.save(folder / "many", model, opt, extra={"step": 5})
    again = build(sizes)
    other = optimizer(again)
    checked: list[Path] = []
    check_file = load.check_file

    def counted(file: Path, entry: Any, *, size_only: bool) -> None:
        checked.extend([] if size_only else [file])
        check_file(file, entry, size_only=size_only)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "check_file", counted)
        samo.load(folder / "many", again, other)
    pairs = [(model.state_dict(), again.state_dict())]
    pairs += [
        (opt.state[a], other.state[b]) for a, b in zip(model.parameters(), again.parameters())
    ]
    for one, two in pairs:
        for key in one:
            assert torch.equal(tensors.local(one[key]), tensors.local(two[key])), key
    return len(checked)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_rows_of_ranks_resume_what_one_process_began_and_the_other_way_round(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    model = build()
    opt = optimizer(model)
    learn(model, opt, slice(None), 0, 3)
    samo.save(tmp_path / "begun", model, opt, extra={"step": 3})
    learn(model, opt, slice(None), 3, 5)
    num_checked = run_ranks(torch.Size(sizes).numel(), resume_sharded, tmp_path, sizes)
    files = checkpoint.verify(tmp_path / "many").files
    assert len(files) == 2 * sizes[-1]  # the first copy writes, each rank its rows
    assert sum(num_checked) == len(files)  # each is compared with its checksum by one rank
    again = build()
    other = optimizer(again)
    assert samo.load(tmp_path / "many", again, other) == {"step": 5}
    for a, b in zip(model.parameters(), again.parameters()):
        # Sums of parts of a batch are rounded otherwise than those of all of it.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        for key, value in opt.state[a].items():
            torch.testing.assert_close(other.state[b][key], value, rtol=0, atol=1e-12)
    file = next(tmp_path.glob("many/data-*/weights-rank00001.safetensors"))
    manifest = checkpoint.read_manifest(tmp_path / "many")
    del manifest.files[file.name]
    with pytest.raises(CheckpointError, match="is there twice, or rows of it are missing"):
        tensors.SavedTensors(tmp_path / "many", manifest, "weights")


def other_shards(rank: int, num_ranks: int, folder: Path) -> list[str]:
    """Fill a sharded dense model, and try to save one that is cut by columns; return the errors."""
    quick_disk()
    model = build((num_ranks,))
    samo.load(folder, model)
    expected = build()
    samo.load(folder, expected)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), expected.get_parameter(name))  # type: ignore[attr-defined]
    odd: Any = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (num_ranks,))
    odd.weight = nn.Parameter(distribute_tensor(odd.weight.detach(), mesh, [Shard(1)]))
    with pytest.raises(CheckpointError, match=r"'weight' is a .*; a checkpoint holds") as found:
        samo.save(folder, odd)
    return [str(found.value)]


def test_a_compressed_checkpoint_fills_rows_of_a_dense_model(tmp_path: Path) -> None:
    model = build()
    samo.compress_(model, samo.prune(model, 0.5))
    samo.save(tmp_path, model)
    for (text,) in run_ranks(2, other_shards, tmp_path):
        assert "sharded by rows along one axis, and torch.distributed.checkpoint other" in text


# A failure anywhere is raised everywhere


def fail_in_turns(rank: int, num_ranks: int, folder: Path) -> list[str]:
    """Let things fail on one rank; return what this rank heard each time."""
    quick_disk()
    run = Run(HALF, Layout(2, 2))
    run.train(1)
    last, heard = folder / "last", []

    def hear(call: Callable[[], object]) -> None:
        before = contents(last)
        try:
            call()
            heard.append("nothing")
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")
        dist.barrier()
        assert contents(last) == before, "the old checkpoint stands"
        assert len(list(last.glob("data-*"))) == 1
        dist.barrier()

    def save(opt: Any = run.opts, **more: Any) -> None:
        samo.save(last, run.pipeline, opt, **more)

    save()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(atomic_io, "write_new", full_disk)
        hear(save)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(atomic_io, "write_bytes", lambda *args: 1 / 0)
        hear(save)
    hear(lambda: save(extra={"bad": {1}} if rank == 0 else None))
    hear(lambda: save(opt=None if rank == 2 else run.opts))
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    values = {name: value.clone() for name, value in run.module.state_dict().items()}
    hear(lambda: samo.load(last, run.pipeline, other if rank == 3 else run.opts))
    hear(lambda: samo.load(last if rank else folder / "nowhere", run.pipeline, run.opts))
    file = next(last.glob("data-*/weights-rank00002.safetensors"))
    data = file.read_bytes()
    dist.barrier()
    if rank == 0:
        file.write_bytes(data[:-1] + b"!")
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        samo.load(last, run.pipeline, run.opts)
    heard.append(str(caught.value))
    assert all(torch.equal(values[n], v) for n, v in run.module.state_dict().items()), "unchanged"
    dist.barrier()
    save()  # and all is well again
    assert not samo.load(last, run.pipeline, run.opts)
    run.close()
    return heard


def full_disk(file: Path, pieces: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(file))


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    heard = list(zip(*run_ranks(4, fail_in_turns, tmp_path)))
    full, broken, extra, missing, misfit, nowhere, damaged = heard
    assert all("CheckpointError: " in text and "cannot save to" in text for text in full)
    assert all("No space left on device" in text for text in full)
    assert all(("rank 2 failed: " in text) == (rank != 2) for rank, text in enumerate(full))
    assert broken[0].startswith("ZeroDivisionError: division by zero")
    assert extra[0].startswith("TypeError: extra/bad is a set")
    for texts, kind in ((broken, "ZeroDivisionError"), (extra, "TypeError")):
        assert all(t.startswith(f"CheckpointError: rank 0 failed: {kind}: ") for t in texts[1:])
    assert all("1 optimizers on rank 0 and 0 on rank 2; give the same" in text for text in missing)
    assert all("not a parameter of this model" in text for text in misfit)
    assert all("rank 3 failed: " in text for text in misfit[:3])
    assert all("nowhere' is not a checkpoint" in text for text in nowhere)
    assert all("its bytes do not match their checksum" in text for text in damaged)


def die_while_saving(
    rank: int, num_ranks: int, folder: Path, victim: int, how: signal.Signals
) -> tuple[str, float]:
    """Save, then save again while one rank is killed or stopped; return what the others hear, and when."""
    quick_disk()
    run = Run(HALF, Layout(2, 2))
    samo.save(folder / "last", run.pipeline, run.opts, extra={"step": 1})
    dist.barrier()
    if rank == victim:
        # A replica, which writes nothing, dies as it begins to.
        atomic_io.write_new = tensors.write_tensors = lambda *args: os.kill(os.getpid(), how)  # type: ignore[assignment, return-value]
        if rank == 3:
            os.kill(os.getpid(), how)
    begun = time.monotonic()
    with pytest.raises(PeerError) as caught:
        samo.save(folder / "last", run.pipeline, run.opts, extra={"step": 2}, timeout_s=1)
    assert caught.value.ranks == (victim,)
    return str(caught.value), time.monotonic() - begun


@pytest.mark.parametrize(
    ("victim", "how"), [(0, signal.SIGKILL), (2, signal.SIGSTOP), (3, signal.SIGKILL)]
)
def test_a_rank_that_dies_while_saving_is_named_on_all_others_and_harms_nothing(
    victim: int, how: signal.Signals, tmp_path: Path
) -> None:
    results = run_ranks(4, die_while_saving, tmp_path, victim, how, lost=[victim])
    for text, seconds in (result for rank, result in enumerate(results) if rank != victim):
        assert f"rank {victim} did not answer for" in text
        assert seconds < 5
    assert checkpoint.verify(tmp_path / "last").extra == {"step": 1}


def work_for_long(rank: int, num_ranks: int, folder: Path) -> None:
    """Save in pieces that take longer together than the timeout."""
    quick_disk()
    tensors.SHARD_BYTES = 100
    write_new = atomic_io.write_new

    def slow(*args: Any) -> None:
        time.sleep(0.3)
        write_new(*args)

    if rank == 1:
        setattr(atomic_io, "write_new", slow)  # noqa: B010
    run = Run(HALF, Layout(2, 1))
    samo.save(folder / "last", run.pipeline, timeout_s=1)
    run.close()


def test_a_rank_that_makes_progress_is_waited_for(tmp_path: Path) -> None:
    run_ranks(2, work_for_long, tmp_path)
    assert len(checkpoint.verify(tmp_path / "last").files) > 10


def test_a_lost_store_is_a_peer_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("[/src/x.cc:5] Connection reset by peer. Check the logs.")

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed, "_get_default_store", dist.HashStore)
    monkeypatch.setattr(dist, "PrefixStore", lambda *_: Store())
    message = r"rank 1 lost the store of its process group, .*: Connection reset by peer\. Look"
    with pytest.raises(PeerError, match=message) as caught:
        distributed.Ranks([0, 1], "samo.save", 1.0).run_all("it", lambda: None)
    assert caught.value.ranks == (0,)


# What stages hold together


def share(names: list[str]) -> dict[str, Any]:
    """Return the share of a stage with weights of 8 entries, 6 of them kept; "a" and "b" decay."""
    groups = [
        {"names": [n for n in names if n < "c"], "settings": {"decay": 0.1}},
        {"names": [n for n in names if n >= "c"], "settings": {"decay": 0.0}},
    ]
    groups = [group for group in groups if group["names"]]
    state = {name: {"exp_avg": {"$tensor": f"{name}/exp_avg"}} for name in names}
    return {
        "is_compressed": True,
        "params": {name: ["float32", 8, 6] for name in names},
        "tensors": names,
        "tied": {},
        "optimizers": [{"class": "samo.AdamW", "groups": groups, "more": {}, "state": state}],
    }


def test_groups_of_stages_are_put_together_and_a_stage_without_parameters_needs_no_optimizer() -> (
    None
):
    empty = share([]) | {"optimizers": []}
    found = merge({0: share(["a", "c"]), 2: share(["b", "d"]), 4: empty})
    groups = found["optimizers"][0]["groups"]
    assert [(group["names"], group["settings"]["decay"]) for group in groups] == [
        (["a"], 0.1), (["c"], 0.0), (["b"], 0.1), (["d"], 0.0),
    ]  # fmt: skip
    assert sorted(found["optimizers"][0]["state"]) == ["a", "b", "c", "d"]
    assert (found["model"]["num_params"], found["model"]["kept"]) == (32, 24)
    assert merge({0: empty})["optimizers"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizers": []}, r"given 1 optimizers on rank 0 and 0 on rank 2; give the same"),
        ({"optimizers": [{}, {}]}, r"samo.save was given 1 optimizers on rank 0 and 2 on rank 2"),
        ({"optimizers": [{"class": "SGD"}]}, r"rank 0 has a samo.AdamW and rank 2 a SGD; build"),
        ({"tensors": ["a"]}, r"ranks 0 and 2, of different stages, both hold 'a', and it is not"),
    ],
)
def test_shares_that_do_not_belong_together_are_refused(change: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        merge(copy.deepcopy({0: share(["a", "c"]), 2: share(["b", "d"]) | change}))


# Which ranks


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(8, 8))
    return samo.compress_(made, samo.prune(made, 0.5))


def test_settings_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"timeout_s must be over 0, got 0"):
        samo.save(tmp_path, model(), timeout_s=0)
    with pytest.raises(TypeError, match=r"mesh must be a DeviceMesh, got int; build one with samo"):
        samo.load(tmp_path, model(), mesh=4)  # type: ignore[arg-type]


def meet(rank: int, num_ranks: int, path: Path) -> None:
    mesh = dist.device_mesh.DeviceMesh("cpu", [0], mesh_dim_names=("data",))
    others = dist.device_mesh.DeviceMesh("cpu", [0, 2], mesh_dim_names=("data",))
    if rank == 1:
        with pytest.raises(CheckpointError, match=r"rank 1 is not in the mesh, which has ranks"):
            samo.save(path, model(), mesh=others)
        return
    samo.save(path / "two", model(), mesh=others)
    if rank == 0:
        samo.save(path / "one", model(), mesh=mesh)  # one rank is one process
        wrapped: Any = nn.Linear(2, 2)
        wrapped.weight = nn.Parameter(distribute_tensor(wrapped.weight.detach(), mesh, [Shard(0)]))
    ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=others.get_group())
    with pytest.raises(
        CheckpointError, match=r"lies on ranks \[0, 2\] and the mesh has ranks \[0\]"
    ):
        samo.save(path, ddp, mesh=mesh)


def test_only_ranks_of_the_mesh_save(tmp_path: Path) -> None:
    run_ranks(3, meet, tmp_path)
    for name in ("one", "two"):
        samo.load(tmp_path / name, nn.Sequential(nn.Linear(8, 8)))


def test_a_pipeline_of_one_stage_is_a_model(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    pipeline = samo.Pipeline(layers, nn.functional.mse_loss, None, 1)
    samo.save(tmp_path, pipeline)
    again = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    samo.load(tmp_path, again)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), layers.parameters()))
