"""A checkpoint's folder: whole after any kill, refused after any damage, never trusted."""

import builtins
import errno
import functools
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

import samo
from samo import checkpoint
from samo.checkpoint import manifest as manifests
from samo.checkpoint.tensors import SavedTensors
from samo.errors import CheckpointError
from samo.utils import atomic_io, safetensors_io
from tests.utils.system import failing_at, record


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(6, 5)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def value_in(path: Path) -> float:
    """Load a checkpoint, all of which must be of one save, and return the value saved in it."""
    model = model_of(-1.0)
    extra = samo.load(path, model)
    values = {*model.weight.flatten().tolist(), *model.bias.tolist(), extra["value"]}
    assert len(values) == 1
    return float(extra["value"])


def save_value(path: Path, value: float) -> None:
    samo.save(path, model_of(value), extra={"value": value, "tensor": torch.full((3,), value)})


def compressed_checkpoint(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16, kernels="reference")
    lr = torch.tensor(0.01)
    opt = samo.AdamW(model.parameters(), lr=lr, entry_steps=True, kernels="reference")
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
    opt.step()
    samo.save(path, model, opt, extra={"value": 1, "tensor": torch.ones(5)})
    return model, opt


def dense_checkpoint(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of(1.0)
    opt = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 6)).sum().backward()
    opt.step()
    samo.save(path, model, opt)
    return model, opt


# Killed at any moment


CALLS = (
    *("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir", "scandir", "link", "lstat"),
)
ACTIONS: dict[str, Callable[[Path, Path], object]] = {
    "save": lambda path, other: save_value(path, 2.0),
    "async_save": lambda path, other: samo.async_save(path, model_of(2.0), extra={"value": 2.0}),
    "copy": lambda path, other: checkpoint.copy(other, path),
    "remove": lambda path, other: checkpoint.remove(path),
}


class Killed(BaseException):
    """Stands for kill -9: nothing catches it, and after it nothing of the process runs."""


class System:
    """Counts calls to the system, and breaks at one of them: once, or, for a kill, for good."""

    def __init__(self, patch: pytest.MonkeyPatch, break_at: int, error: BaseException) -> None:
        self.calls = 0
        for owner, name in [*((os, name) for name in CALLS), (builtins, "open")]:
            real = getattr(owner, name)
            patch.setattr(owner, name, functools.partial(self.call, real, break_at, error))

    def call(self, real: Any, break_at: int, error: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        is_dead = isinstance(error, Killed) and self.calls > break_at
        if self.calls == break_at or is_dead:
            raise error
        return real(*args, **kwargs)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "error", [Killed(), KeyboardInterrupt(), FULL], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize(("action", "has_old"), [("save", False), *((a, True) for a in ACTIONS)])
def test_what_breaks_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    action: str, has_old: bool, error: BaseException, tmp_path: Path
) -> None:
    path, other = tmp_path / "checkpoint", tmp_path / "other"
    save_value(other, 2.0)
    outcomes: set[object] = set()
    for number in itertools.count(1):
        if path.exists():
            shutil.rmtree(path)
        if has_old:
            save_value(path, 1.0)
        open_files = os.listdir("/proc/self/fd")
        with pytest.MonkeyPatch.context() as patch:
            system = System(patch, number, error)
            try:
                done = ACTIONS[action](path, other)
                if isinstance(done, Future):
                    done.result()
            except (Killed, KeyboardInterrupt, CheckpointError) as caught:
                outcomes.add(type(caught))
        if system.calls < number:
            break
        outcomes.add(value_in(path) if (path / "manifest.json").exists() else None)
        if not isinstance(error, Killed):
            assert len(list(path.glob("data-*"))) <= 2
            assert not list(path.glob(".*"))
            assert len(os.listdir("/proc/self/fd")) == len(open_files)
        save_value(path, 3.0)
        assert (value_in(path), value_in(other)) == (3.0, 2.0)
        assert len(os.listdir(path)) == 2, "leftovers"
        assert len(list(path.glob("data-*/*"))) == 2
    assert number > 5
    caught_type = CheckpointError if error is FULL else type(error)
    new = None if action == "remove" else 2.0
    assert outcomes == {caught_type, 1.0 if has_old else None, new}


def test_all_tensors_are_on_the_disk_before_the_manifest_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_value(tmp_path / "last", 1.0)
    done = record(monkeypatch, "fsync", "replace", "unlink")
    save_value(tmp_path / "last", 2.0)
    files = ["weights.safetensors", "extra.safetensors", "data-X", "data-X", "last"]
    assert done == [*files, ".manifest.json.X", "replace", "last", "unlink", "unlink"]


def test_a_full_disk_is_an_error_that_names_file_and_cause_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_value(tmp_path, 1.0)
    before = sorted(tmp_path.rglob("*.*"))
    (tmp_path / "data-00000000").mkdir()  # of a killed save, which takes room
    (tmp_path / "data-00000000" / "weights.safetensors").touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    message = r"cannot save to '.*': '.*/data-[0-9a-f]{8}/weights.safetensors': File too large; fre"
    try:
        for path, is_first in ((tmp_path, False), (tmp_path / "new" / "folder", True)):
            with pytest.raises(CheckpointError, match=message) as caught:
                save_value(path, 2.0)
            assert ("The previous checkpoint is intact" in str(caught.value)) != is_first
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_io, "encode", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # is not disguised
            save_value(tmp_path / "new", 2.0)
    assert sorted(tmp_path.rglob("*.*")) == before
    assert value_in(tmp_path) == 1.0


def test_a_manifest_whose_rename_could_not_be_synced_keeps_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_value(tmp_path, 1.0)
    sync = Mock(side_effect=[None] * 6 + [OSError(errno.EIO, "broken")])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        with pytest.raises(CheckpointError, match="broken"):
            save_value(tmp_path, 2.0)
    assert value_in(tmp_path) == 2.0
    assert len(list(tmp_path.glob("data-*"))) == 2  # a power cut may bring the old manifest back
    save_value(tmp_path, 3.0)
    assert len(list(tmp_path.glob("data-*"))) == 1


# Overwriting, other folders, other people's files


def test_a_checkpoint_is_made_replaced_moved_and_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (1.0, 2.0):
        save_value(Path("runs/a/last"), value)
        assert value_in(Path("runs/a/last")) == value
    Path("runs/a/last").rename("moved")
    Path("link").symlink_to("moved")
    save_value(Path("link"), 3.0)
    assert value_in(Path("moved")) == 3.0
    manifest = Path("moved/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-10])
    save_value(Path("moved"), 4.0)  # a damaged one is replaced
    assert value_in(Path("moved")) == 4.0
    assert len(os.listdir("moved")) == 2


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    save_value(tmp_path, 1.0)
    for name in ("notes.txt", "data-12345678/mine.txt", "data-zzzzzzzz/weights.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "data-00000000").symlink_to(tmp_path / "data-zzzzzzzz")
    save_value(tmp_path, 2.0)
    assert value_in(tmp_path) == 2.0
    for name in ("notes.txt", "data-12345678/mine.txt", "data-00000000/weights.safetensors"):
        assert (tmp_path / name).read_text() == "mine"


def test_a_folder_that_is_another_programs_a_file_or_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    (tmp_path / "file").touch()
    save_value(tmp_path / "last", 1.0)
    with atomic_io.locked(tmp_path / "last"):
        for name, message in (
            (".", "its 'manifest.json' is not one of samo"),
            ("file", "'.*file': File exists"),
            ("file/deeper", "'.*file': File exists"),
            ("last", "another process or thread is saving there; give each"),
        ):
            with pytest.raises(CheckpointError, match=rf"cannot save to '{tmp_path}.*': {message}"):
                save_value(tmp_path / name, 2.0)
    assert value_in(tmp_path / "last") == 1.0
    assert sorted(os.listdir(tmp_path)) == ["file", "last", "manifest.json"]


# Damage


def test_any_flipped_or_missing_byte_is_refused_with_the_file(tmp_path: Path) -> None:
    model, opt = compressed_checkpoint(tmp_path)
    before = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    changed = [param.detach().clone() for param in model.parameters()]
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == 5
    chance = random.Random(0)
    for i in range(40):
        file = files[i % 5]
        data = file.read_bytes()
        place = chance.randrange(len(data))
        flipped = bytes([data[place] ^ 1 << chance.randrange(8)])
        kind = chance.choice(["flip", "drop", "add", "cut"])
        file.write_bytes(
            {
                "flip": data[:place] + flipped + data[place + 1 :],
                "drop": data[:place] + data[place + 1 :],
                "add": data[:place] + flipped + data[place:],
                "cut": data[:place],
            }[kind]
        )
        for read in (lambda: samo.load(tmp_path, model, opt), lambda: checkpoint.verify(tmp_path)):
            with pytest.raises(CheckpointError) as caught:
                read()
            assert f"'{file}' is damaged" in str(caught.value), (kind, place)
        file.write_bytes(data)
    assert all(map(torch.equal, model.parameters(), changed))
    samo.load(tmp_path, model, opt)
    assert all(map(torch.equal, model.parameters(), before))


def test_what_is_missing_or_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_value(tmp_path, 1.0)
    file = next(tmp_path.glob("data-*/weights.safetensors"))
    for name in ("none", file.parent.name):
        with pytest.raises(CheckpointError, match=r"is not a checkpoint: (it|there) .*; write"):
            samo.load(tmp_path / name, model_of(0.0))
    real = open
    for denied in (file, tmp_path / "manifest.json"):

        def deny(path: Any, *args: Any, denied: Path = denied, **kwargs: Any) -> Any:
            if Path(path) == denied:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", deny)
            with pytest.raises(CheckpointError, match=f"'{denied}' cannot be read: Permission"):
                checkpoint.verify(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"'{file}' is damaged: it is missing"):
        checkpoint.verify(tmp_path)
    file.mkdir()
    with pytest.raises(CheckpointError, match=f"'{file}' is damaged: it is not a file"):
        checkpoint.verify(tmp_path)


# Strangers


def forge(path: Path, *keys: str | int, value: Any) -> None:
    """Change a value in a manifest, and give it a new checksum."""
    file = path / "manifest.json"
    content = entry = json.loads(file.read_bytes())
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = value
    file.write_bytes(manifests.encode_manifest(content))


def forge_file(path: Path, name: str, data: bytes) -> None:
    found = checkpoint.read_manifest(path)
    (found.data / name).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(path, "files", name, value=entry)


def forge_tensors(path: Path, kind: str, change: dict[str, Tensor | None]) -> None:
    """Replace tensors of a checkpoint, add some, or remove those that are None."""
    saved = SavedTensors(checkpoint.read_manifest(path), kind)
    changed = {name: saved.read(name).clone() for name in saved.specs} | change
    kept = {name: value for name, value in changed.items() if value is not None}
    forge_file(path, f"{kind}.safetensors", save_tensors(kept))


def refused(path: Path, model: nn.Module, opt: Any, message: str) -> None:
    """Check that loading raises, and changes neither the model nor the optimizer."""
    before = [*model.state_dict().values(), *(v for s in opt.state.values() for v in s.values())]
    copies, groups = [value.clone() for value in before], repr(opt.param_groups)
    with pytest.raises(CheckpointError, match=message):
        samo.load(path, model, opt)
    assert all(map(torch.equal, before, copies))
    assert repr(opt.param_groups) == groups


ENTRY = {"bytes": 1, "sha256": "0" * 64}

FORGERIES: list[tuple[Any, ...]] = [
    ("data", "../elsewhere"),
    ("data", "data-\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661"),
    ("files", "/etc/passwd", ENTRY),
    ("files", "../weights.safetensors", ENTRY),
    ("files", "weights.safetensors\n", ENTRY),
    ("files", "weights.safetensors", {"bytes": 1}),
    ("files", "weights.safetensors", "bytes", -1),
    ("files", "weights.safetensors", "bytes", True),
    ("files", "weights.safetensors", "bytes", 2**70),
    ("files", "weights.safetensors", "sha256", "00"),
    ("time", "0001-01-01T00:00:00+23:59"),
    ("time", "9999-12-31T23:59:59-23:59"),
    ("extra", {"$float": "nan"}),
    ("extra", "a", {"$float": "one"}),
    ("extra", "a", {"$tensor": ["F32", 3]}),
    ("extra", {"$x": 1}),
    ("scaler", {"scale": "1"}),
    ("scaler", {"scale": -1.0}),
    ("scaler", {"scale": 10**400}),
    ("optimizer", "groups", [{"names": "ab", "settings": {}}]),
    ("optimizer", "groups", 0, "settings", "lr", {"$tensor": "0.weight/step"}),
    ("optimizer", "state", "0.weight", "step", {"$tensor": ["F32", 3]}),
    ("extra", "a", json.loads("[" * 400 + "]" * 400)),
    ("format", "another"),
    ("version", "3"),
]


def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    model, opt = compressed_checkpoint(tmp_path)
    good = (tmp_path / "manifest.json").read_bytes()
    for *keys, value in FORGERIES:
        (tmp_path / "manifest.json").write_bytes(good)
        forge(tmp_path, *keys, value=value)
        refused(tmp_path, model, opt, "manifest.json' is damaged: its contents are not valid")


def paths(value: Any, *keys: str | int) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in JSON."""
    pairs = enumerate(value) if isinstance(value, list) else value.items()
    for key, item in pairs:
        yield (*keys, key)
        yield from paths(item, *keys, key) if isinstance(item, dict | list) else ()


def test_any_value_of_another_type_is_refused_or_does_not_matter(tmp_path: Path) -> None:
    model, opt = compressed_checkpoint(tmp_path)
    good = (tmp_path / "manifest.json").read_bytes()
    chance, count = random.Random(0), 0
    values: list[Any] = [None, True, -1, 0.5, 2**70, "x", [], {}, [{}], {"$tensor": "x"}]
    for keys in paths(json.loads(good)):
        (tmp_path / "manifest.json").write_bytes(good)
        forge(tmp_path, *keys, value=chance.choice(values))
        try:
            samo.load(tmp_path, model, opt)
        except CheckpointError:
            count += 1
    assert count > 50


def with_checksum(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text},\n"checksum": "{digest}"\n}}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it does not match its checksum, or samo did not write it"),
        ('{"format": "samo-checkpoint"}', "it does not match its checksum"),
        (with_checksum("") + " ", "it does not match its checksum"),
        (with_checksum(""), "its contents are not valid"),
        (with_checksum("[1"), "its contents are not valid"),
        (with_checksum('{"format": "samo-checkpoint"'), "its contents are not valid"),
        (with_checksum('{"a":' * 100_000), "its contents are not valid"),
        (with_checksum('{"a": ' + "9" * 10_000), "its contents are not valid"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_what_is_not_a_manifest_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"manifest.json' is damaged: {message}"):
        checkpoint.read_manifest(tmp_path)


def test_a_manifest_of_another_version_or_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_value(tmp_path, 1.0)
    forge(tmp_path, "version", value=4)
    with pytest.raises(CheckpointError, match="has version 4, this samo reads version 3; update"):
        checkpoint.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(with_checksum("{" + " " * manifests.MAX_BYTES))
    with pytest.raises(CheckpointError, match=r"is damaged: it has more than 16,777,216 bytes"):
        checkpoint.read_manifest(tmp_path)
    monkeypatch.setattr(manifests, "MAX_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"is damaged: it has more than 100 bytes"):
        checkpoint.read_manifest(tmp_path)
    with pytest.raises(ValueError, match=r"would have .* bytes, the limit is 100; give long"):
        save_value(tmp_path / "new", 1.0)
    assert not os.listdir(tmp_path / "new")


NAMES = "the tensors of its {} are not those its manifest names"
INSTEAD = "optimizer state of '.*weight' is .* instead of"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "weights",
            {"0.weight": torch.zeros(33)},
            r"values of shape \(33,\), and its mask keeps 32",
        ),
        ("optimizer", {"0.weight/exp_avg": torch.zeros(5)}, INSTEAD),
        ("optimizer", {"0.weight/step": torch.zeros(5)}, INSTEAD),
        ("optimizer", {"0.weight/exp_avg": torch.zeros(32).half()}, INSTEAD),
        ("optimizer", {"weight/exp_avg": torch.zeros(5, 6).double()}, INSTEAD),
        ("optimizer", {"weight/exp_avg_sq": torch.zeros(5, 6) > 0}, INSTEAD),
        ("optimizer", {"weight/exp_avg": torch.zeros(6, 5)}, INSTEAD),
        ("optimizer", {"weight/step": torch.zeros(1)}, INSTEAD),
        ("optimizer", {"weight/step": torch.tensor(3)}, INSTEAD),
        ("optimizer", {"0.weight/step": torch.tensor(-1.0)}, "step must be 0 or more, got -1"),
        ("optimizer", {"0.weight/step": torch.tensor(torch.nan)}, "step must be a finite number"),
        ("optimizer", {"0.weight/age": torch.full((32,), -1).short()}, "weight': ages must be"),
        ("optimizer", {"x": torch.zeros(5)}, NAMES.format("optimizer state")),
        ("optimizer", {"0.weight/step": None}, NAMES.format("optimizer state")),
        ("extra", {"x": torch.zeros(5)}, NAMES.format("extra")),
        ("extra", {"extra/tensor": None, "a": torch.zeros(1)}, NAMES.format("extra")),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_a_kernel_sees_them(
    kind: str, change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    is_dense = min(change).startswith("weight/")  # of an optimizer of torch
    model, opt = (dense_checkpoint if is_dense else compressed_checkpoint)(tmp_path)
    forge_tensors(tmp_path, kind, change)
    refused(tmp_path, model, opt, message)


STATE = ("state", "0.weight")
GROUP = ("groups", 0, "settings")
BAD_SETTINGS: list[tuple[str, Any]] = [
    *(("lr", value) for value in ("x", -1, True, None, [0.1], {"$float": "nan"}, 10**400)),
    *(("lr", {"$tensor": tensor}) for tensor in (["F99", 1], ["F32", [[1], 2]], ["U8", 999])),
    *(("lr", {"$tensor": tensor}) for tensor in ([1, 2, 3], ["F32", [1, 2]], ["F32", -1.0])),
    *(("betas", value) for value in ([0.9], 0.9, [0.9, 1.0], [0.9, "x"], [0.9, {"$float": "inf"}])),
    *((key, value) for key in ("eps", "weight_decay") for value in (-0.1, "x", {"$float": "inf"})),
    ("initial_lr", {"$float": "nan"}),
    ("lean", 1),
    ("kernels", "fastest"),
]


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ((*STATE, "step"), 3, NAMES.format("optimizer state")),
        (STATE, {}, NAMES.format("optimizer state")),
        ((*STATE, "more"), {"$tensor": "0.weight/exp_avg"}, NAMES.format("optimizer state")),
        ((*STATE, "more"), 1, "'more': None.* instead of"),
        ((*STATE, "exp_avg"), [{"$tensor": "0.weight/exp_avg"}], "'exp_avg': None.* instead of"),
        (("state", "ghost"), {"a": 1}, "is damaged: it has optimizer state without settings"),
        (("more",), {"x": {"$tensor": ["F99", 1]}}, "its settings are not valid"),
        ((*GROUP, "lean"), True, "build samo.AdamW with state='lean' and entry_steps=True"),
        *(((*GROUP, key), value, "its settings are not valid") for key, value in BAD_SETTINGS),
    ],
)
def test_optimizer_state_that_refers_to_the_wrong_things_is_refused(
    keys: tuple[Any, ...], value: Any, message: str, tmp_path: Path
) -> None:
    model, opt = compressed_checkpoint(tmp_path)
    forge(tmp_path, "optimizer", *keys, value=value)
    refused(tmp_path, model, opt, message)


def test_a_setting_that_was_not_saved_keeps_its_value(tmp_path: Path) -> None:
    model, opt = compressed_checkpoint(tmp_path)
    entry = json.loads((tmp_path / "manifest.json").read_bytes())["optimizer"]
    del entry["groups"][0]["settings"]["betas"]
    forge(tmp_path, "optimizer", value=entry)
    opt.param_groups[0]["betas"] = (0.5, 0.6)
    samo.load(tmp_path, model, opt)
    assert opt.param_groups[0]["betas"] == (0.5, 0.6)


def test_a_scaler_that_counts_in_fractions_is_refused(tmp_path: Path) -> None:
    model, scaler = model_of(1.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    samo.save(tmp_path, model, scaler=scaler)
    forge(tmp_path, "scaler", "growth_interval", value=0.5)
    with pytest.raises(
        CheckpointError, match=r"loss scaler .*'growth_interval': 0.5.* and this on"
    ):
        samo.load(tmp_path, model, scaler=scaler)


def rows(text: str) -> bytes:
    return save_tensors({"x": torch.ones(2)}, {"rows": text})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (save_tensors({"weight": torch.ones(5, 6)}), "rows of 'weight' are missing, or there twic"),
        (save_tensors({"weight": torch.ones(2)}), "its 'weight' is torch.float32 .* in another"),
        (rows('{"x": [3, 5]}'), "rows of 'x' are missing"),
        (rows('{"x": [-1, 1]}'), "rows of 'x' are missing"),
        (rows('{"x": 3}'), "it is not a safetensors file"),
        (rows('{"x": [0.0, 2.0]}'), "it is not a safetensors file"),
        (rows("[]"), "it is not a safetensors file"),
        (rows("[" * 10_000), "it is not a safetensors file"),
        (b"not safetensors at all", "it is not a safetensors file"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    data: bytes, message: str, tmp_path: Path
) -> None:
    save_value(tmp_path, 1.0)
    forge_file(tmp_path, "weights-rank00001.safetensors", data)
    with pytest.raises(CheckpointError, match=rf"\.safetensors' is damaged: .*{message}"):
        samo.load(tmp_path, model_of(0.0))


def test_masks_of_a_stranger_are_refused(tmp_path: Path) -> None:
    model, opt = compressed_checkpoint(tmp_path)
    words = {"0.weight": torch.zeros(2, dtype=torch.int32)}
    for shapes in ('{"0.weight": [8.0, 8]}', '{"0.weight": [99999999, 99999999]}'):
        metadata = {"format": "samo-masks", "version": "1", "shapes": shapes, "fingerprint": ""}
        forge_file(tmp_path, "masks.safetensors", save_tensors(words, metadata))
        refused(tmp_path, model, opt, r"masks.safetensors' is damaged: mask file")
        with pytest.raises(CheckpointError, match=r"masks.safetensors' is damaged: mask file"):
            samo.load_masks(tmp_path)


@pytest.mark.parametrize("is_param", [True, False])
def test_a_mask_of_what_is_no_floating_point_parameter_is_refused(
    is_param: bool, tmp_path: Path
) -> None:
    def build(value: float, dtype: torch.dtype) -> nn.Module:
        model = model_of(value)
        odd = torch.full((2, 3), value).to(dtype)
        model.odd = nn.Parameter(odd, requires_grad=False) if is_param else nn.Buffer(odd)
        return model

    dtype = torch.int64 if is_param else torch.float32
    model, again = build(1.0, dtype), build(0.0, dtype)
    samo.save(tmp_path, samo.compress_(model, samo.prune(model, 0.5)))
    masks = {**samo.load_masks(tmp_path), "odd": samo.Mask.from_bool(torch.ones(2, 3) > 0)}
    samo.Masks(masks).save(tmp_path / "masks")
    forge_file(tmp_path, "masks.safetensors", (tmp_path / "masks").read_bytes())
    with pytest.raises(CheckpointError, match="its mask of 'odd' is not of a floating-point param"):
        samo.load(tmp_path, again)
    assert not any(value.any() for value in again.state_dict().values())


# Reading, copying


def test_a_manifest_is_read_verified_and_copied_without_torch(tmp_path: Path) -> None:
    save_value(tmp_path / "a", 1.0)
    code = (
        "import sys; from samo import checkpoint\n"
        "print(checkpoint.verify(sys.argv[1]).num_params)\n"
        "checkpoint.copy(sys.argv[1], sys.argv[2])\n"
        "assert not {'torch', 'numpy', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a", tmp_path / "b"], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("35\n", "")
    assert value_in(tmp_path / "b") == 1.0
    found = checkpoint.read_manifest(tmp_path / "b")
    assert timedelta(0) <= datetime.now(UTC) - found.time < timedelta(minutes=1)
    assert (found.samo_version, found.dtype) == (samo.__version__, "float32")
    assert (found.is_compressed, found.num_params, found.kept) == (False, 35, 35)
    assert found.extra == {"value": 1.0, "tensor": "extra/tensor"}
    assert (found.optimizer, found.scaler) == (None, None)


def test_a_copy_shares_its_files_and_outlives_the_original(tmp_path: Path) -> None:
    last, best = tmp_path / "last", tmp_path / "best"
    save_value(last, 1.0)
    save_value(best, 0.0)
    checkpoint.copy(last, str(best))
    nodes = [{f.stat().st_ino for f in path.glob("data-*/*")} for path in (last, best)]
    assert nodes[0] == nodes[1]
    a, b = (checkpoint.verify(path) for path in (last, best))
    assert (a.time, a.files, a.extra) == (b.time, b.files, b.extra)
    save_value(last, 2.0)
    assert (value_in(last), value_in(best)) == (2.0, 1.0)
    (tmp_path / "link").symlink_to("best")
    with pytest.raises(ValueError, match=r"cannot copy checkpoint '.*best' onto itself; give"):
        checkpoint.copy(best, tmp_path / "link")


def test_a_copy_without_links_is_checked_and_a_failed_one_leaves_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, best = tmp_path / "last", tmp_path / "best"
    save_value(last, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", failing_at(1, OSError(errno.ENOSPC, "full"), os.link))
        with pytest.raises(CheckpointError, match=r"cannot save to '.*best': .*full"):
            checkpoint.copy(last, best)
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EXDEV, "other disk")))
    checkpoint.copy(last, best)
    for file in last.glob("data-*/*"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"is damaged: its bytes do not match"):
        checkpoint.copy(last, best)
    assert value_in(best) == 1.0
    assert len(list(best.iterdir())) == 2


# Links, pipes, devices


def link_to(target: Path | str) -> Any:
    return lambda path: path.symlink_to(target)


ODD_FILES = {"zeros": link_to("/dev/zero"), "dangling": link_to("../victim"), "pipe": os.mkfifo}


@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_not_a_file_is_neither_read_nor_written_through(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "last"
    samo.save(path, samo.compress_(model := model_of(1.0), samo.prune(model, 0.5)))
    good = shutil.copytree(path, tmp_path / "good")
    data = checkpoint.read_manifest(path).data.name
    for name in ("manifest.json", f"{data}/weights.safetensors", f"{data}/masks.safetensors"):
        (path / name).unlink()
        ODD_FILES[kind](path / name)
        for act in (checkpoint.verify, samo.load_masks, lambda p: samo.load(p, model_of(0.0))):
            if act is samo.load_masks and "weights" in name:
                continue
            with pytest.raises(CheckpointError, match=r"' is damaged: it is (a link|not a file)"):
                act(path)
        with pytest.raises(CheckpointError, match=r"it is|not one of samo"):
            checkpoint.copy(path, tmp_path / "copy")
        if name == "manifest.json":
            with pytest.raises(CheckpointError, match=r"its 'manifest.json' is not one of samo"):
                save_value(path, 2.0)
            with pytest.raises(CheckpointError, match=r"its 'manifest.json' is not one of samo"):
                checkpoint.remove(path)
        (path / name).unlink()
        shutil.copy(good / name, path / name)
    assert not (tmp_path / "victim").exists()
    (path / data).rename(tmp_path / "data")
    (path / data).symlink_to(tmp_path / "data")
    with pytest.raises(CheckpointError, match=rf"{data}' is damaged: it is a link"):
        checkpoint.verify(path)
    save_value(path, 2.0)
    assert value_in(path) == 2.0
    assert len(os.listdir(tmp_path / "data")) == 2, "nothing is removed through a link"


def test_a_manifest_of_many_values_is_refused_at_once(tmp_path: Path) -> None:
    head = '{"format": "samo-checkpoint", "version": 3, "extra": ['
    text = with_checksum(head + "[]," * 2**20 + "1]")
    (tmp_path / "manifest.json").write_text(text)
    begun = time.process_time()
    with pytest.raises(CheckpointError, match="it has more than 524,288 values"):
        checkpoint.read_manifest(tmp_path)
    assert time.process_time() - begun < 1
    with pytest.raises(ValueError, match=r"would have 600,\d+ values, the limit is 524,288; give"):
        samo.save(tmp_path / "new", model_of(0.0), extra={"list": [1] * 600_000})
