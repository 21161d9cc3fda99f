"""Checkpoints of many ranks: from any layout into any other; a failure on one is raised on all."""

import copy
import errno
import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import samo
from samo import checkpoint
from samo.checkpoint import reader, tensors
from samo.checkpoint.save import merge
from samo.checkpoint.tensors import SavedTensors
from samo.core.shards import local_of
from samo.distributed import ranks
from samo.errors import CheckpointError, PeerError
from samo.utils import atomic_io
from tests.checkpoint.cases import Case, Layout, Run, contents, draw
from tests.checkpoint.test_save_load import assert_same
from tests.ranks import run_ranks
from tests.utils.system import failing_at

HALF = Case(torch.bfloat16)
LEAN = Case(torch.bfloat16, "lean")
TIED = Case(torch.bfloat16, is_tied=True)
PAIRS = {
    3: ((Case(torch.bfloat16, "sgd"), Layout(1, 3)), (TIED, Layout(3, 1))),
    4: (
        (TIED, Layout(2, 2)),
        (TIED, Layout(4, 1)),
        (Case(torch.float32, "sgd"), Layout(2, 2)),
        (LEAN, Layout(2, 2)),
        (Case(), Layout(2, 2, 2)),
    ),
}
"""By number of ranks: what is saved from and loaded into which layout."""

EXTRA = {"step": 3, "seeds": torch.arange(3)}


def quick_disk() -> None:
    os.fsync = lambda file: None  # type: ignore[assignment]


def save_new(case: Case, layout: Layout | None, path: Path, extra: dict[str, Any] = EXTRA) -> None:
    run = Run(case, layout)
    run.train(1)
    run.randomise()
    samo.save(path, run.pipeline, run.opt, extra=extra)
    run.pipeline.close()


def load_and_save(case: Case, layout: Layout | None, path: Path, again: Path) -> None:
    run = Run(case, layout, samo.load_masks(path), seed=1)
    extra = samo.load(path, run.pipeline, run.opt)
    samo.save(again, run.pipeline, run.opt, extra=extra)
    run.pipeline.close()


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
    for i, (case, layout) in enumerate(PAIRS[num_ranks]):
        save_new(case, layout, folder / str(i), EXTRA if rank == 0 else {"other": rank})
        load_and_save(case, layout, folder / case.name, folder / "again")
        for name in (str(i), "again") if rank == 0 else ():
            wrong += differing(folder / name, folder / case.name)
        dist.barrier()
    if num_ranks == 3:
        only_ranks_of_the_mesh_save(rank, folder / "mesh")
    return wrong


def only_ranks_of_the_mesh_save(rank: int, path: Path) -> None:
    one = DeviceMesh("cpu", [0], mesh_dim_names=("data",))
    two = DeviceMesh("cpu", [0, 2], mesh_dim_names=("data",))
    if rank == 1:
        with pytest.raises(CheckpointError, match=r"rank 1 called samo.save, but the mesh has"):
            samo.save(path, nn.Linear(2, 2), mesh=two)
        return
    samo.save(path / "two", nn.Linear(2, 2), mesh=two)
    ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=two.get_group())
    with pytest.raises(CheckpointError, match=r"on ranks \[0, 2\] but the mesh has only ranks \[0"):
        samo.save(path, ddp, mesh=one)
    if rank == 0:
        samo.save(path / "one", nn.Linear(2, 2), mesh=one)  # one rank is one process
        for name in ("one", "two"):
            samo.load(path / name, nn.Linear(2, 2))


@pytest.mark.parametrize("num_ranks", PAIRS)
def test_every_layout_saves_and_loads_what_one_process_would(
    num_ranks: int, tmp_path: Path
) -> None:
    for case in {case for case, _ in PAIRS[num_ranks]}:
        save_new(case, None, tmp_path / case.name)
    assert run_ranks(num_ranks, save_and_load, tmp_path, timeout_s=100) == [[]] * num_ranks
    for i, (case, _) in enumerate(PAIRS[num_ranks]):  # and back into one process
        load_and_save(case, None, tmp_path / str(i), tmp_path / "again")
        assert differing(tmp_path / "again", tmp_path / case.name) == []


def resume_replicas(rank: int, num_ranks: int, folder: Path) -> None:
    """Save from DistributedDataParallel, with ZeRO or not, and load into it again."""
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
        samo.save(folder / "replicas", ddp, opt, extra={"step": 1})
        step(ddp, opt, 1)
        again, again_opt = build(2, is_sharded=not is_sharded)
        samo.load(folder / "replicas", again, again_opt)
        step(again, again_opt, 1)
        for name, value in ddp.state_dict().items():
            assert torch.equal(value, again.state_dict()[name]), (name, is_sharded)
    dist.barrier()


def fill_shards(rank: int, num_ranks: int, folder: Path) -> None:
    """Fill a sharded dense model, and try to save one that is cut by columns."""
    sharded, expected = build_rows((num_ranks,)), build_rows()
    for model in (sharded, expected):
        samo.load(folder / "compressed", model)
    for name, param in sharded.named_parameters():
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), expected.get_parameter(name))
    odd: Any = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (num_ranks,))
    odd.weight = nn.Parameter(distribute_tensor(odd.weight.detach(), mesh, [Shard(1)]))
    with pytest.raises(CheckpointError, match=r"cannot hold 'weight': .* not dense or sharded by"):
        samo.save(folder / "odd", odd)


def save_slowly(rank: int, num_ranks: int, folder: Path) -> None:
    """Save in chunks that take longer together than the timeout."""
    write, begun = os.write, time.monotonic()

    def slow(*args: Any) -> int:
        time.sleep(0.03)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "write", slow)
            patch.setattr(tensors, "_CHUNK_BYTES", 100)
        run = Run(HALF, Layout(2, 1))
        samo.save(folder / "slow", run.pipeline, timeout_s=0.5)
        run.pipeline.close()
    assert time.monotonic() - begun > 1.5


def on_two_ranks(rank: int, num_ranks: int, folder: Path) -> None:
    quick_disk()
    for check in (resume_replicas, fill_shards, save_slowly):
        check(rank, num_ranks, folder)


def test_two_replicas_resume_exactly_fill_shards_and_wait_for_a_slow_rank(tmp_path: Path) -> None:
    model = build_rows()
    samo.compress_(model, samo.prune(model, 0.5))
    samo.save(tmp_path / "compressed", model)
    run_ranks(2, on_two_ranks, tmp_path)
    found = checkpoint.verify(tmp_path / "replicas")
    assert found.optimizer is not None
    assert set(found.optimizer["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all("-rank00000" in name for name in found.files)
    checkpoint.verify(tmp_path / "slow")


# Rows of FSDP2

BATCH = 8
SIZES = [(4,), (2, 2)]


def build_rows(sizes: tuple[int, ...] = ()) -> nn.Module:
    """Return a small model; with mesh sizes, sharded over the last axis, copied along others."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5, bias=False)]
    model = nn.Sequential(*layers).double()
    if sizes:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "rows")[-len(sizes) :])
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def learn(model: nn.Module, opt: torch.optim.Optimizer, rows: slice, start: int, stop: int) -> None:
    """Take steps on this rank's rows of the batches; FSDP2 averages over equal parts."""
    for step in range(start, stop):
        x = draw(f"batch {step}", BATCH * 6).view(BATCH, 6).double()
        opt.zero_grad()
        model(x[rows]).square().mean().backward()
        opt.step()


def resume_rows(rank: int, num_ranks: int, folder: Path) -> list[int]:
    """Resume what one process began, save, and load that again; return how many files were read."""
    quick_disk()
    return [resume_on_mesh(rank, num_ranks, folder, sizes) for sizes in SIZES]


def resume_on_mesh(rank: int, num_ranks: int, folder: Path, sizes: tuple[int, ...]) -> int:
    model, again = build_rows(sizes), build_rows(sizes)
    opt, other = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, again))
    # Its root stays whole after a forward pass until a backward pass comes.
    model(torch.zeros(1, 6, dtype=torch.float64))
    assert samo.load(folder / "begun", model, opt) == {"step": 3}
    assert all(isinstance(s["exp_avg"], DTensor) for s in opt.state.values())
    learn(model, opt, slice(BATCH * rank // num_ranks, BATCH * (rank + 1) // num_ranks), 3, 5)
    model(torch.zeros(1, 6, dtype=torch.float64))
    samo.save(folder / str(sizes), model, opt, extra={"step": 5})
    checked: list[Path] = []
    check_file = reader.check_file

    def counted(file: Path, entry: Any, *, size_only: bool, on_chunk: Any) -> None:
        checked.extend([] if size_only else [file])
        check_file(file, entry, size_only=size_only, on_chunk=on_chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "check_file", counted)
        samo.load(folder / str(sizes), again, other)
    learn(again, other, slice(None), 0, 1)
    load_with_broken_reads(rank, folder / str(sizes), again, again, other)
    pairs = [(model.state_dict(), again.state_dict())]
    pairs += [
        (opt.state[a], other.state[b]) for a, b in zip(model.parameters(), again.parameters())
    ]
    for one, two in pairs:
        for key in one:
            assert torch.equal(local_of(one[key]), local_of(two[key])), key
    return len(checked)


def load_with_broken_reads(rank: int, path: Path, model: Any, module: nn.Module, opt: Any) -> None:
    """Let a later and later read fail on one rank; until none does, all ranks stay as they were."""

    def state() -> list[Any]:
        found = [
            *module.state_dict().values(),
            *(v for s in opt.state.values() for v in s.values()),
        ]
        return [local_of(tensor).clone() for tensor in found]

    before = state()
    for number, victim in zip(itertools.count(3, 14), itertools.cycle(range(4))):
        with pytest.MonkeyPatch.context() as patch:
            if rank == victim:
                read = failing_at(number, OSError(5, "a broken disk"), SavedTensors.read)
                patch.setattr(SavedTensors, "read", read)
            try:
                samo.load(path, model, opt)
                break
            except (CheckpointError, OSError):
                assert_same(state(), before)
    assert number > 3


def test_rows_of_ranks_resume_what_one_process_began_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    model = build_rows()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    learn(model, opt, slice(None), 0, 3)
    samo.save(tmp_path / "begun", model, opt, extra={"step": 3})
    learn(model, opt, slice(None), 3, 5)
    num_checked = zip(*run_ranks(4, resume_rows, tmp_path))
    for sizes, checked in zip(SIZES, num_checked):
        path = tmp_path / str(sizes)
        manifest = checkpoint.verify(path)
        assert len(manifest.files) == 2 * sizes[-1]  # the first copy writes, each rank its rows
        assert sum(checked) == len(manifest.files)  # one rank compares a file with its checksum
        again = build_rows()
        other = torch.optim.AdamW(again.parameters(), lr=1e-2)
        assert samo.load(path, again, other) == {"step": 5}
        for a, b in zip(model.parameters(), again.parameters()):
            # Sums of parts of a batch are rounded otherwise than those of all of it.
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
            for key, value in opt.state[a].items():
                torch.testing.assert_close(other.state[b][key], value, rtol=0, atol=1e-12)
        del manifest.files["weights-rank00001.safetensors"]
        with pytest.raises(CheckpointError, match=r"rows of '.*' are missing, or there twice"):
            SavedTensors(manifest, "weights")


# A failure on one rank is raised on all


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
        assert contents(last) == before, "the old checkpoint is intact"
        assert len(list(last.glob("data-*"))) == 1
        dist.barrier()

    def save(opt: Any = run.opt, **more: Any) -> None:
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
    hear(lambda: save(opt=None if rank == 2 else run.opt))
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    values = {name: value.clone() for name, value in run.module.state_dict().items()}
    hear(lambda: samo.load(last, run.pipeline, other if rank == 3 else run.opt))
    hear(lambda: samo.load(last if rank else folder / "nowhere", run.pipeline, run.opt))
    file = next(last.glob("data-*/weights-rank00002.safetensors"))
    data = file.read_bytes()
    dist.barrier()
    if rank == 0:
        file.write_bytes(data[:-1] + b"!")
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        samo.load(last, run.pipeline, run.opt)
    heard.append(str(caught.value))
    assert all(torch.equal(values[n], v) for n, v in run.module.state_dict().items()), "unchanged"
    dist.barrier()
    save()  # and all is well again
    run.train(1)
    load_with_broken_reads(rank, last, run.pipeline, run.module, run.opt)
    run.pipeline.close()
    return heard


def full_disk(file: Path, pieces: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(file))


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    heard = list(zip(*run_ranks(4, fail_in_turns, tmp_path)))
    full, broken, extra, missing, misfit, nowhere, damaged = heard
    assert all("No space left on device" in text for text in full)
    assert all(("rank 2 failed: " in text) == (rank != 2) for rank, text in enumerate(full))
    assert broken[0].startswith("ZeroDivisionError: division by zero")
    assert extra[0].startswith("TypeError: extra/bad is a set")
    for texts, kind in ((broken, "ZeroDivisionError"), (extra, "TypeError")):
        assert all(t.startswith(f"CheckpointError: rank 0 failed: {kind}: ") for t in texts[1:])
    assert all("different optimizers, {0: 'samo.AdamW', 2: None}" in text for text in missing)
    assert all("that the model lacks" in text for text in misfit)
    assert all("rank 3 failed: " in text for text in misfit[:3])
    assert all("nowhere' is not a checkpoint" in text for text in nowhere)
    assert all("its bytes do not match their checksum" in text for text in damaged)


def die_while_saving(
    rank: int, num_ranks: int, folder: Path, victim: int, how: signal.Signals
) -> tuple[str, float]:
    """Save, then save again while one rank is killed or stopped; return what the others hear."""
    quick_disk()
    run = Run(HALF, Layout(2, 2))
    samo.save(folder / "last", run.pipeline, run.opt, extra={"step": 1})
    dist.barrier()
    if rank == victim:
        atomic_io.write_new = lambda *args: os.kill(os.getpid(), how)  # type: ignore[assignment]
        if rank == 3:  # a replica, which writes nothing, dies before it saves
            os.kill(os.getpid(), how)
    begun = time.monotonic()
    with pytest.raises(PeerError) as caught:
        samo.save(folder / "last", run.pipeline, run.opt, extra={"step": 2}, timeout_s=0.7)
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


def test_a_lost_store_is_a_peer_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = dist.DistNetworkError("[/src/x.cc:5] Connection reset by peer. Check the logs.")
    store = Mock(**{"set.side_effect": lost})
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "group", Mock())
    monkeypatch.setattr(dist, "PrefixStore", lambda *_: store)
    message = r"rank 1 lost the store of its process group, .*: Connection reset by peer\. Look"
    with pytest.raises(PeerError, match=message) as caught:
        ranks.Ranks([0, 1], "samo.save", 1.0).run_all("it", lambda: None)
    assert caught.value.ranks == (0,)


# What stages hold together


def share(*names: str, **more: Any) -> dict[str, Any]:
    """Return the share of a stage with weights of 8 entries, 6 of them kept."""
    params = {name: ["float32", 8, 6] for name in names}
    entry = {"class": "SGD", "groups": [{"names": names}], "more": {}, "state": {}}
    found = {"is_compressed": True, "params": params, "tensors": names, "tied": {}}
    return copy.deepcopy({**found, "optimizer": entry, **more})


def test_stages_are_put_together_and_one_without_parameters_needs_no_optimizer() -> None:
    empty = share(optimizer=None)
    found = merge({0: share("a", "c"), 1: None, 2: share("b", "d"), 4: empty})
    assert [group["names"] for group in found["optimizer"]["groups"]] == [("a", "c"), ("b", "d")]
    assert (found["model"]["num_params"], found["model"]["kept"]) == (32, 24)
    assert merge({0: empty})["optimizer"] is None
    with pytest.raises(
        CheckpointError, match=r"different optimizers, .*2: 'AdamW'\}; give the same"
    ):
        merge({0: share("a"), 2: share("b", optimizer={"class": "AdamW"})})
    with pytest.raises(CheckpointError, match=r"ranks 0 and 2 are different stages but both have"):
        merge({0: share("a"), 2: share("a", "b")})


def test_a_pipeline_of_one_stage_is_a_model(tmp_path: Path) -> None:
    layers, again = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
    samo.save(tmp_path, samo.Pipeline(layers, nn.functional.mse_loss, None, 1))
    samo.load(tmp_path, again)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), layers.parameters()))
    with pytest.raises(ValueError, match=r"timeout_s must be over 0, got 0"):
        samo.save(tmp_path, again, timeout_s=0)
