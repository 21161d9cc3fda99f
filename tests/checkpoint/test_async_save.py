"""samo.async_save: a checkpoint of the moment of the call, while training continues."""

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samo
from samo import checkpoint
from samo.checkpoint import staging, tensors
from samo.checkpoint.save import prepare
from samo.errors import CheckpointError
from tests.checkpoint.cases import Case, Layout, Run
from tests.checkpoint.test_ranks import differing, quick_disk
from tests.checkpoint.test_save_load import LEAN, OPTIMIZERS, compressed, net, step
from tests.ranks import run_ranks


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no file be written until this is set."""
    go, write = threading.Event(), tensors.atomic_io.write_new

    def write_new(*args: Any) -> None:
        assert go.wait(30)
        write(*args)

    monkeypatch.setattr(tensors.atomic_io, "write_new", write_new)
    return go


@pytest.mark.parametrize("kind", ["samo.AdamW", "lean", "Adam", "LBFGS"])
def test_training_does_not_change_what_is_being_saved(
    kind: str, tmp_path: Path, slow_disk: threading.Event
) -> None:
    model = net() if kind == "LBFGS" else compressed(**LEAN)
    opt = OPTIMIZERS[kind](model)
    for seed in range(3):  # later ones reuse the memory of the copies
        slow_disk.set()
        step(model, opt, seed)
        samo.save(tmp_path / "then", model, opt, extra={"step": seed})
        slow_disk.clear()
        extra = {"step": seed, "noise": torch.ones(3)}
        saving = samo.async_save(tmp_path / "a", model, opt, extra=extra)
        step(model, opt, seed + 10)
        extra["noise"].zero_()
        assert not saving.done()
        slow_disk.set()
        saving.result()
        found = [checkpoint.verify(tmp_path / name).files for name in ("a", "then")]
        del found[0]["extra.safetensors"]
        assert found[0] == found[1]  # with their SHA-256
        assert samo.load(tmp_path / "a", net(1))["noise"].tolist() == [1, 1, 1]


def test_copies_use_the_same_memory_again() -> None:
    conjugate = torch.randn(3, 3, dtype=torch.complex64).conj()
    held = {"weights": {"a": torch.randn(100), "b": conjugate}}
    place = staging.stage(held)["weights"]["a"].data_ptr()
    held["weights"]["a"].add_(1)
    again = staging.stage(held)["weights"]
    assert again["a"].data_ptr() == place != held["weights"]["a"].data_ptr()
    for name, tensor in held["weights"].items():
        assert torch.equal(again[name], tensor)


def test_the_memory_of_the_first_save_can_be_taken_ahead(tmp_path: Path) -> None:
    staging.release()
    model = compressed(**LEAN)
    opt = OPTIMIZERS["lean"](model)
    step(model, opt, 0)
    prepare(model, opt)
    staging.wait_for_pending()
    rooms = {kind: dict(group) for kind, group in staging._copies.items()}
    samo.async_save(tmp_path, model, opt).result()
    for kind, group in staging._copies.items():
        assert all(room is rooms[kind][name] for name, room in group.items())
    assert sum(map(len, rooms.values())) > len(list(model.parameters()))
    prepare(model, torch.optim.SGD(nn.Linear(3, 3).parameters()))  # which the save will refuse


def test_saves_wait_for_the_one_before_them(tmp_path: Path, slow_disk: threading.Event) -> None:
    model = nn.Linear(3, 3)
    first = samo.async_save(tmp_path, model, extra={"n": 1})
    threading.Timer(0.1, slow_disk.set).start()
    second = samo.async_save(tmp_path, model, extra={"n": 2})
    assert first.done()
    samo.save(tmp_path / "b", model)
    assert second.done()
    assert samo.load(tmp_path, model) == {"n": 2}


def test_what_fails_is_raised_by_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 3)
    samo.save(tmp_path / "a", model, extra={"n": 1})
    other = torch.optim.SGD(nn.Linear(3, 3).parameters())
    with pytest.raises(CheckpointError, match="that the model lacks"):
        samo.async_save(tmp_path / "a", model, other).result()
    with monkeypatch.context() as patch:
        patch.setattr(staging, "stage", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            samo.async_save(tmp_path / "a", model).result()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot save to"):
        samo.async_save(tmp_path / "file", model).result()
    with pytest.raises(TypeError, match="must be a Module"):
        samo.async_save(tmp_path / "a", "model")  # type: ignore[arg-type]
    assert samo.load(tmp_path / "a", model) == {"n": 1}
    samo.async_save(tmp_path / "a", model, extra={"n": 2}).result()
    assert samo.load(tmp_path / "a", model) == {"n": 2}


def test_a_process_that_exits_completes_its_save(tmp_path: Path) -> None:
    script = """
        import sys, torch, samo
        samo.async_save(sys.argv[1], torch.nn.Linear(1000, 1000), extra={"n": 1})
        sys.exit(3)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)])
    assert done.returncode == 3
    assert checkpoint.verify(tmp_path).extra == {"n": 1}


def test_a_forked_process_saves_while_its_parent_does(tmp_path: Path) -> None:
    script = """
        import os, sys, time, torch, samo
        from samo.checkpoint import tensors
        write = tensors.atomic_io.write_new
        tensors.atomic_io.write_new = lambda *args: time.sleep(0.3) or write(*args)
        model = torch.nn.Linear(3, 3)
        saving = samo.async_save(f"{sys.argv[1]}/parent", model)
        child = os.fork()
        samo.save(f"{sys.argv[1]}/{child and 'later'}", model)
        if child:
            os.waitpid(child, 0)
            saving.result()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    for name in ("parent", "0", "later"):
        checkpoint.verify(tmp_path / name)


def test_what_was_saved_is_not_kept_alive(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError):
        samo.async_save(tmp_path / "file", model).result()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    staging.release()
    assert not staging._copies


def test_ctrl_c_during_the_copy_is_for_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "stage", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        samo.async_save(tmp_path, nn.Linear(3, 3))


def save_in_steps(rank: int, num_ranks: int, folder: Path) -> None:
    quick_disk()
    for case, layout in ((Case(torch.bfloat16, "lean"), Layout(1, 2)), (Case(), Layout(2, 1))):
        run = Run(case, layout)
        run.train(1)
        samo.save(folder / "then", run.pipeline, run.opt)
        saving = samo.async_save(folder / "a", run.pipeline, run.opt)
        run.train(2)  # with collectives and messages of its own
        saving.result()
        assert not differing(folder / "a", folder / "then")
        if rank == 0:
            run.opt.param_groups[0]["params"][0] = torch.zeros(1)
        failing = samo.async_save(folder / "a", run.pipeline, run.opt)
        with pytest.raises(CheckpointError, match="that the model lacks"):
            failing.result()
        assert not differing(folder / "a", folder / "then")
        run.pipeline.close()
        dist.barrier()


def test_ranks_save_while_they_train(tmp_path: Path) -> None:
    run_ranks(2, save_in_steps, tmp_path)
