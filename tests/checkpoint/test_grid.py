"""Checkpoints of many ranks: what one process would have written, from and into any layout."""

import errno
import itertools
import os
import signal
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import samo
from samo import checkpoint
from samo.checkpoint import gathering, load, save, tensors
from samo.utils import atomic_io
from tests.checkpoint.cases import Case, Layout, Run, contents, draw
from tests.ranks import run_ranks

FLOAT = Case()
HALF = Case(torch.bfloat16)
SGD = Case(torch.bfloat16, "sgd")
TIED = Case(torch.bfloat16, is_tied=True)
LEAN = Case(torch.bfloat16, "lean")
BOTH = Case(torch.float32, "both")
PAIRS = {
    3: ((SGD, Layout(1, 3)), (TIED, Layout(3, 1))),
    4: (
        (HALF, Layout(2, 2)),
        (TIED, Layout(2, 2)),
        (TIED, Layout(4, 1)),
        (BOTH, Layout(2, 2)),
        (LEAN, Layout(2, 2)),
        (FLOAT, Layout(2, 2, "interleaved")),
    ),
}
"""By number of ranks: what is saved from and loaded into which layout."""


def quick_disk() -> None:
    os.fsync = lambda file: None  # type: ignore[assignment]


def reference(case: Case, path: Path, seed: int = 7) -> None:
    """Write what one process would."""
    run = Run(case, None)
    run.train(1)
    run.randomise(seed)
    samo.save(path, run.pipeline, run.opts, extra={"step": 3, "seeds": torch.arange(3)})
    run.close()


def differing(path: Path, expected: Path) -> list[str]:
    """Return what is not the same in two checkpoints."""
    a, b = contents(path), contents(expected)
    return [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


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
        if rank == 0:  # it has written all of it
            wrong += [f"{path.name} saved {what}" for what in differing(path, folder / case.name)]
        run.close()
        run = Run(case, layout, samo.load_masks(path), seed=1)
        assert samo.load(folder / case.name, run.pipeline, run.opts)["step"] == 3
        again = Path(f"{path}-again")
        samo.save(again, run.pipeline, run.opts, extra=given)
        if rank == 0:
            wrong += [f"{path.name} loaded {what}" for what in differing(again, folder / case.name)]
        run.close()
    return wrong


@pytest.mark.parametrize("num_ranks", PAIRS)
def test_every_layout_writes_and_reads_what_one_process_would(
    num_ranks: int, tmp_path: Path
) -> None:
    for case in {case for case, _ in PAIRS[num_ranks]}:
        reference(case, tmp_path / case.name)
    results = run_ranks(num_ranks, save_and_load, tmp_path, timeout_s=100)
    assert results == [[]] * num_ranks


# Training goes on


def train_on(rank: int, num_ranks: int, folder: Path) -> list[str]:
    """Train, save, train; and from what was saved, train the same again."""
    quick_disk()
    wrong = []
    for case, layout in ((LEAN, Layout(1, 2)), (SGD, Layout(2, 1))):
        run = Run(case, layout)
        run.train(2)
        samo.save(folder / "middle", run.pipeline, run.opts)
        run.train(2)
        samo.save(folder / "end", run.pipeline, run.opts)
        run.close()
        run = Run(case, layout, samo.load_masks(folder / "middle"), seed=1)
        samo.load(folder / "middle", run.pipeline, run.opts)
        run.train(2)
        samo.save(folder / "again", run.pipeline, run.opts)
        run.close()
        found = differing(folder / "again", folder / "end")
        wrong += [f"{case.name} {layout.name} {what}" for what in found]
        assert differing(folder / "middle", folder / "end"), "it has learnt something"
    return wrong


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert run_ranks(2, train_on, tmp_path) == [[], []]


# Replicas of torch


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


def test_replicas_of_ddp_save_once_and_all_load(tmp_path: Path) -> None:
    run_ranks(2, wrapped, tmp_path)
    assert set(checkpoint.verify(tmp_path / "last").optimizers[0]["state"]) == {
        "0.weight", "0.bias", "2.weight", "2.bias",
    }  # fmt: skip
    model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16))
    assert samo.load(tmp_path / "last", model) == {"step": 1}


# Each rank reads its part, and the writer holds one tensor at a time


def read_parts(rank: int, num_ranks: int, folder: Path) -> tuple[int, str]:
    """Return how many files this rank has compared with their checksums, and what it says of damage."""
    quick_disk()
    tensors.SHARD_BYTES = 2000
    run = Run(HALF, Layout(2, 1))
    run.train(1)
    alive: list[weakref.ref[Tensor]] = []

    def watched(*args: Any) -> tensors.Source:
        source = fetched(*args)

        def make() -> Tensor:
            assert all(reference() is None for reference in alive), (
                "the tensor before is still there"
            )
            made = source.make()
            if args[3].rank != rank:
                alive.append(weakref.ref(made))
            return made

        return source._replace(make=make)

    fetched = save.fetched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "fetched", watched)
        samo.save(folder / "last", run.pipeline, run.opts)
    assert len(alive) >= 20 * (rank == 0)
    checked: list[Path] = []
    check_file = load.check_file

    def counted(file: Path, entry: Any) -> None:
        checked.append(file)
        check_file(file, entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "check_file", counted)
        samo.load(folder / "last", run.pipeline, run.opts)
    dist.barrier()
    manifest = checkpoint.read_manifest(folder / "last")
    if rank == 0:
        last = folder / "last" / manifest.data / list(manifest.files_of("weights"))[-1]
        last.write_bytes(last.read_bytes()[:-1] + b"!")
    dist.barrier()
    with pytest.raises(samo.CheckpointError) as caught:
        samo.load(folder / "last", run.pipeline, run.opts)
    run.close()
    assert len(checked) < 0.8 * len(manifest.files)
    return len(checked), str(caught.value)


def test_a_rank_reads_its_part_and_hears_of_damage_in_another(tmp_path: Path) -> None:
    counts, texts = zip(*run_ranks(2, read_parts, tmp_path))
    assert sum(counts) >= len(checkpoint.read_manifest(tmp_path / "last").files)
    assert all("its bytes do not match their checksum" in text for text in texts)


# What fails anywhere fails everywhere


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
        checkpoint.verify(last)
        dist.barrier()

    def save(opt: Any = run.opts, **more: Any) -> None:
        samo.save(last, run.pipeline, opt, **more)

    save()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(atomic_io, "write_new", full_disk)
        hear(save)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(gathering, "host_bytes", lambda tensor: 1 / 0)
        hear(save)
    hear(lambda: save(extra={"bad": {1}} if rank == 0 else None))
    hear(lambda: save(opt=None if rank == 2 else run.opts))
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    hear(lambda: save(opt=other if rank == 2 else run.opts))
    values = {name: value.clone() for name, value in run.module.state_dict().items()}
    hear(lambda: samo.load(last, run.pipeline, other if rank == 3 else run.opts))
    hear(lambda: samo.load(last if rank else folder / "nowhere", run.pipeline, run.opts))
    assert all(torch.equal(values[n], v) for n, v in run.module.state_dict().items()), "unchanged"
    save()  # and all is well again
    assert not samo.load(last, run.pipeline, run.opts)
    run.close()
    return heard


def full_disk(file: Path, pieces: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(file))


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    heard = list(zip(*run_ranks(4, fail_in_turns, tmp_path)))
    full, given, extra, missing, foreign, misfit, nowhere = heard
    assert all("CheckpointError: cannot save to" in text for text in full)
    assert all("No space left on device" in text for text in full)
    assert given[2].startswith("ZeroDivisionError: division by zero")
    for rank in (0, 1, 3):
        assert given[rank].startswith("CheckpointError: rank 2 failed: ZeroDivisionError: division")
    assert extra[0].startswith("TypeError: extra/bad is a set")
    assert all(text.startswith("CheckpointError: rank 0 failed: TypeError") for text in extra[1:])
    assert all("1 optimizers on rank 0 and 0 on rank 2; give the same" in text for text in missing)
    assert all("is no parameter of this model" in text for text in foreign)
    assert all("is no parameter of this model" in text for text in misfit)
    assert all("nowhere' is not a checkpoint" in text for text in nowhere)


def die_while_saving(
    rank: int, num_ranks: int, folder: Path, victim: int, how: signal.Signals
) -> tuple[str, float]:
    """Save, then save again while one rank is killed or stopped; return what the others hear, and when."""
    quick_disk()
    run = Run(HALF, Layout(2, 2))
    run.train(1)
    samo.save(folder / "last", run.pipeline, run.opts, extra={"step": 1})
    run.train(1)
    dist.barrier()
    if rank == victim:
        patch_to_die(how, after=5)
    begun = time.monotonic()
    with pytest.raises(samo.PeerError) as caught:
        samo.save(folder / "last", run.pipeline, run.opts, extra={"step": 2}, timeout_s=3)
    assert caught.value.ranks == (victim,)
    return str(caught.value), time.monotonic() - begun


def patch_to_die(how: signal.Signals, after: int) -> None:
    """Be killed, as by kill -9, or stopped when so many tensors have been made ready."""
    calls, whole = itertools.count(), tensors.host_bytes

    def host_bytes(tensor: Tensor) -> Tensor:
        if next(calls) == after:
            os.kill(os.getpid(), how)
        return whole(tensor)

    def nothing() -> Any:
        os.kill(os.getpid(), how)

    tensors.host_bytes = gathering.host_bytes = host_bytes  # type: ignore[attr-defined]
    save._nothing = nothing  # what replicas give


@pytest.mark.parametrize(
    ("victim", "how"),
    [(0, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGSTOP), (3, signal.SIGKILL)],
)
def test_a_rank_that_falls_while_saving_ends_all_and_harms_nothing(
    victim: int, how: signal.Signals, tmp_path: Path
) -> None:
    results = run_ranks(4, die_while_saving, tmp_path, victim, how, lost=[victim])
    fate = "is gone" if how == signal.SIGKILL else "was silent for 3 s"
    for result in (result for rank, result in enumerate(results) if rank != victim):
        text, seconds = result
        assert f"rank {victim} {fate}, while rank" in text
        assert "pair.cc" not in text
        assert seconds < 10
    assert checkpoint.verify(tmp_path / "last").extra == {"step": 1}
