"""Checkpoints of many ranks: what one process would have written, from and into any layout."""

import errno
import itertools
import os
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from samo import checkpoints, durable
from samo.checkpoints import gathering, loading, saving, shards
from samo.kernels.lean import Moments, dequantise_weight
from samo.owners import owned_weights
from tests.checkpoint_cases import Case, Layout, Run, contents
from tests.ranks import run_ranks

FLOAT = Case()
HALF = Case(torch.bfloat16)
SGD = Case(torch.bfloat16, "sgd")
TIED = Case(torch.bfloat16, is_tied=True)
LEAN = Case(torch.bfloat16, "lean")
PAIRS = {
    3: ((SGD, Layout(1, 3, "state")), (TIED, Layout(3, 1))),
    4: (
        (HALF, Layout(2, 2, "state")),
        (TIED, Layout(2, 2, "state")),
        (TIED, Layout(4, 1)),
        (HALF, Layout(1, 4, "state")),
        (LEAN, Layout(2, 2)),
        (FLOAT, Layout(2, 2, None, "interleaved")),
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
    samo.save(path, run.pipeline, run.opt, extra={"step": 3, "seeds": torch.arange(3)})
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
        samo.save(path, run.pipeline, run.opt, extra=given)
        if rank == 0:  # it has written all of it
            wrong += [f"{path.name} saved {what}" for what in differing(path, folder / case.name)]
        run.close()
        run = Run(case, layout, samo.Masks.load(path), seed=1)
        assert samo.load(folder / case.name, run.pipeline, run.opt)["step"] == 3
        again = Path(f"{path}-again")
        samo.save(again, run.pipeline, run.opt, extra=given)
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
    for case, layout in ((LEAN, Layout(1, 2, "state")), (SGD, Layout(2, 1))):
        run = Run(case, layout)
        run.train(2)
        samo.save(folder / "middle", run.pipeline, run.opt)
        run.train(2)
        samo.save(folder / "end", run.pipeline, run.opt)
        run.close()
        run = Run(case, layout, samo.Masks.load(folder / "middle"), seed=1)
        samo.load(folder / "middle", run.pipeline, run.opt)
        run.train(2)
        samo.save(folder / "again", run.pipeline, run.opt)
        run.close()
        found = differing(folder / "again", folder / "end")
        wrong += [f"{case.name} {layout.name} {what}" for what in found]
        assert differing(folder / "middle", folder / "end"), "it has learnt something"
    return wrong


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert run_ranks(2, train_on, tmp_path) == [[], []]


# Lean state that is sharded has groups of its own


def moments(run: Run) -> dict[str, Tensor]:
    """Return the fp32 moments of what this rank holds, by name."""
    found = {}
    for name, weight in owned_weights(run.module).items():
        part, state = weight.part, run.opt.state[weight.part.leaf]
        keys = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
        both = dequantise_weight(
            Moments(*(state[key] for key in keys)), part.param.numel(), part.mask
        )
        owned = None if weight.replica is None else weight.replica.owned
        for key, value in zip(keys, both):
            full = torch.zeros(weight.kept)
            full[slice(None) if owned is None else slice(*owned)] = value
            found[f"{name}/{key}"] = full
    return found


def save_lean(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    quick_disk()
    if num_ranks == 2:
        run = Run(LEAN, Layout(1, 2, "state"))
        run.train(3)
        samo.save(folder / "lean", run.pipeline, run.opt)
    else:
        run = Run(LEAN, Layout(1, 3, "state"), samo.Masks.load(folder / "lean"), seed=1)
        samo.load(folder / "lean", run.pipeline, run.opt)
    found = moments(run)
    for value in found.values():
        dist.all_reduce(value)
    run.close()
    return {name: value.numpy() for name, value in found.items()}


def test_sharded_lean_state_goes_into_other_layouts_rounded_once_more(tmp_path: Path) -> None:
    before = run_ranks(2, save_lean, tmp_path)[0]
    alone = Run(LEAN, None, samo.Masks.load(tmp_path / "lean"), seed=1)
    samo.load(tmp_path / "lean", alone.pipeline, alone.opt)
    three = run_ranks(3, save_lean, tmp_path)[0]
    for after in (moments(alone), three):
        for name, value in before.items():
            value, found = torch.from_numpy(value), torch.as_tensor(after[name])
            largest = float(value.abs().max())
            # Half a step of the coarser code, 1/127 of its fourth root, next to the largest entry.
            torch.testing.assert_close(found, value, rtol=0, atol=0.02 * largest)
            assert float(found.abs().max()) == pytest.approx(largest)
    samo.save(tmp_path / "alone", alone.pipeline, alone.opt)  # a whole weight's state from here on
    state = checkpoints.read_manifest(tmp_path / "alone").optimizer["state"]
    assert all("parts" not in content for content in state.values())


# Each rank reads its part, and the writer holds one tensor at a time


def read_parts(rank: int, num_ranks: int, folder: Path) -> tuple[int, str]:
    """Return how many files this rank has compared with their checksums, and what it says of damage."""
    quick_disk()
    shards.SHARD_BYTES = 2000
    run = Run(HALF, Layout(2, 1))
    run.train(1)
    alive: list[weakref.ref[Tensor]] = []

    def watched(*args: Any) -> shards.Source:
        source = fetched(*args)

        def make() -> Tensor:
            assert all(reference() is None for reference in alive), (
                "the tensor before is still there"
            )
            made = source.make()
            if args[3].pieces[0].rank != rank:
                alive.append(weakref.ref(made))
            return made

        return source._replace(make=make)

    fetched = saving.fetched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "fetched", watched)
        samo.save(folder / "last", run.pipeline, run.opt)
    assert len(alive) >= 20 * (rank == 0)
    checked: list[Path] = []
    check_file = loading.check_file

    def counted(file: Path, entry: Any) -> None:
        checked.append(file)
        check_file(file, entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "check_file", counted)
        samo.load(folder / "last", run.pipeline, run.opt)
    dist.barrier()
    manifest = checkpoints.read_manifest(folder / "last")
    if rank == 0:
        last = folder / "last" / manifest.data / list(manifest.files_of("weights"))[-1]
        last.write_bytes(last.read_bytes()[:-1] + b"!")
    dist.barrier()
    with pytest.raises(samo.CheckpointError) as caught:
        samo.load(folder / "last", run.pipeline, run.opt)
    run.close()
    assert len(checked) < 0.8 * len(manifest.files)
    return len(checked), str(caught.value)


def test_a_rank_reads_its_part_and_hears_of_damage_in_another(tmp_path: Path) -> None:
    counts, texts = zip(*run_ranks(2, read_parts, tmp_path))
    assert sum(counts) >= len(checkpoints.read_manifest(tmp_path / "last").files)
    assert all("its bytes do not match their checksum" in text for text in texts)


# What fails anywhere fails everywhere


def fail_in_turns(rank: int, num_ranks: int, folder: Path) -> list[str]:
    """Let things fail on one rank; return what this rank heard each time."""
    quick_disk()
    run = Run(HALF, Layout(2, 2, "state"))
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
        checkpoints.verify(last)
        dist.barrier()

    def save(opt: Any = run.opt, **more: Any) -> None:
        samo.save(last, run.pipeline, opt, **more)

    save()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(durable, "write_new", full_disk)
        hear(save)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr(gathering, "host_bytes", lambda tensor: 1 / 0)
        hear(save)
    hear(lambda: save(extra={"bad": {1}} if rank == 0 else None))
    hear(lambda: save(opt=None if rank == 2 else run.opt))
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    hear(lambda: save(opt=other if rank == 1 else run.opt))
    run.opt.param_groups[0]["lr"] = 0.01 if rank < 2 else 0.5
    hear(save)
    run.opt.param_groups[0]["lr"] = 0.01
    values = {name: value.clone() for name, value in run.module.state_dict().items()}
    hear(lambda: samo.load(last, run.pipeline, other if rank == 3 else run.opt))
    hear(lambda: samo.load(last if rank else folder / "nowhere", run.pipeline, run.opt))
    assert all(torch.equal(values[n], v) for n, v in run.module.state_dict().items()), "unchanged"
    hear(lambda: samo.load(last, run.module, run.opt, mesh=samo.mesh(2, 2)["pipe"]))
    save()  # and all is well again
    assert not samo.load(last, run.pipeline, run.opt)
    run.close()
    return heard


def full_disk(file: Path, pieces: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(file))


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    heard = list(zip(*run_ranks(4, fail_in_turns, tmp_path)))
    full, given, extra, missing, foreign, settings, misfit, nowhere, mesh = heard
    assert all("CheckpointError: cannot save to" in text for text in full)
    assert all("No space left on device" in text for text in full)
    assert [text.partition(":")[0] for text in given] == [
        *["CheckpointError"] * 3,
        *["ZeroDivisionError"],
    ]
    assert given[0].startswith(
        "CheckpointError: rank 3 failed: ZeroDivisionError: division by zero"
    )
    assert extra[0].startswith("TypeError: extra/bad is a set")
    assert all(text.startswith("CheckpointError: rank 0 failed: TypeError") for text in extra[1:])
    assert all("rank 0 gave an optimizer to samo.save and rank 2 none" in text for text in missing)
    assert all("is no parameter of this model" in text for text in foreign)
    assert all("lr=0.01 on rank 0 and 0.5 on rank 2" in text for text in settings)
    assert all("is no parameter of this model" in text for text in misfit)
    assert all("nowhere' is not a checkpoint" in text for text in nowhere)
    assert all("replicated over ranks" in text and "all of them" in text for text in mesh)


def die_while_saving(
    rank: int, num_ranks: int, folder: Path, victim: int, how: signal.Signals
) -> tuple[str, float]:
    """Save, then save again while one rank is killed or stopped; return what the others hear, and when."""
    quick_disk()
    run = Run(HALF, Layout(2, 2, "state"))
    run.train(1)
    samo.save(folder / "last", run.pipeline, run.opt, extra={"step": 1})
    run.train(1)
    dist.barrier()
    if rank == victim:
        patch_to_die(how, after=5)
    begun = time.monotonic()
    with pytest.raises(samo.PeerError) as caught:
        samo.save(folder / "last", run.pipeline, run.opt, extra={"step": 2}, timeout_s=3)
    assert caught.value.ranks == (victim,)
    return str(caught.value), time.monotonic() - begun


def patch_to_die(how: signal.Signals, after: int) -> None:
    """Be killed, as by kill -9, or stopped when so many tensors have been made ready."""
    calls, whole = itertools.count(), shards.host_bytes

    def host_bytes(tensor: Tensor) -> Tensor:
        if next(calls) == after:
            os.kill(os.getpid(), how)
        return whole(tensor)

    shards.host_bytes = gathering.host_bytes = host_bytes  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("victim", "how"), [(0, signal.SIGKILL), (3, signal.SIGKILL), (1, signal.SIGSTOP)]
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
    assert checkpoints.verify(tmp_path / "last").extra == {"step": 1}
