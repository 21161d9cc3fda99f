"""A checkpoint's folder: whole after any kill, refused after any damage, not believed from a stranger."""

import errno
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

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


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of real ones take seconds; test_atomic_io.py has them."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


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
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    opt = samo.AdamW(model.parameters())
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
    opt.step()
    samo.save(path, model, opt, extra={"value": 1, "tensor": torch.ones(5)})
    return model, opt


# Killed at any moment


CALLS = ("os.open", "os.write", "os.fsync", "os.replace", "os.mkdir", "os.unlink", "os.rmdir")


class Killed(BaseException):
    """Stands for kill -9: nothing catches it, and after it nothing of the process runs."""


class System:
    """Counts calls to the system, and at one of them breaks: once, or, for a kill, for good."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, break_at: int, error: BaseException
    ) -> None:
        self.calls = 0
        for name in CALLS:
            monkeypatch.setattr(name, self.counting(getattr(os, name[3:]), break_at, error))

    def counting(self, real: Any, break_at: int, error: BaseException) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            is_dead = isinstance(error, Killed) and self.calls > break_at
            if self.calls == break_at or is_dead:
                raise error
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("is_first", [True, False], ids=["new folder", "old checkpoint"])
def test_a_save_that_breaks_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    error: BaseException, is_first: bool, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    if not is_first:
        save_value(path, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        system = System(patch, -1, OSError())
        save_value(path, 0.0)
    assert system.calls > 15
    outcomes = set()
    for number in range(1, system.calls + 1):
        shutil.rmtree(path)
        if not is_first:
            save_value(path, 1.0)
        with pytest.MonkeyPatch.context() as patch:
            System(patch, number, error)
            try:
                save_value(path, 2.0)
            except (Killed, CheckpointError) as caught:
                outcomes.add(type(caught))
        if is_first and not (path / "manifest.json").exists():
            outcomes.add("none")
        else:
            outcomes.add(value_in(path))
        if isinstance(error, OSError):
            assert len(list(path.glob("data-*"))) <= 2
            assert not list(path.glob(".*"))
        save_value(path, 3.0)
        assert value_in(path) == 3.0
        assert len(os.listdir(path)) == 2, "leftovers"
        assert len(list(path.glob("data-*/*"))) == 2
    caught_type = Killed if isinstance(error, Killed) else CheckpointError
    assert outcomes == {caught_type, "none" if is_first else 1.0, 2.0}


def test_all_tensors_are_on_the_disk_before_the_manifest_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def note(call: str, name: Callable[..., str]) -> None:
        real = getattr(os, call)

        def noted(*args: Any) -> Any:
            done.append(name(*args))
            return real(*args)

        monkeypatch.setattr(os, call, noted)

    save_value(tmp_path / "last", 1.0)
    note(
        "fsync", lambda f: re.sub("[0-9a-f]{8}", "X", Path(os.readlink(f"/proc/self/fd/{f}")).name)
    )
    note("replace", lambda *_: "switch")
    note("unlink", lambda *_: "remove")
    save_value(tmp_path / "last", 2.0)
    files = ["weights.safetensors", "extra.safetensors", "data-X", "data-X", "last"]
    assert done == [*files, ".manifest.json.X", "switch", "last", "remove", "remove"]


def test_a_full_disk_is_an_error_that_names_file_and_cause_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_value(tmp_path, 1.0)
    before = sorted(tmp_path.rglob("*"))

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    message = (
        r"cannot save to '.*': '.*/data-[0-9a-f]{8}/weights.safetensors': No space left on device; "
        "what was saved there before is unharmed"
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match=message) as caught:
            save_value(tmp_path, 2.0)
        with pytest.raises(CheckpointError, match=message):
            save_value(tmp_path / "new" / "folder", 2.0)
    assert isinstance(caught.value.__cause__, OSError)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"weights.safetensors': File too large"):
            save_value(tmp_path, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_io, "encode", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # is not disguised
            save_value(tmp_path / "new", 2.0)
    assert sorted(tmp_path.rglob("*")) == before
    assert value_in(tmp_path) == 1.0


def test_a_manifest_whose_rename_could_not_be_synced_keeps_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_value(tmp_path, 1.0)
    replace = os.replace

    def replace_and_break(*args: Any) -> None:
        replace(*args)
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_and_break)
        with pytest.raises(CheckpointError, match="broken"):
            save_value(tmp_path, 2.0)
    assert value_in(tmp_path) == 2.0
    assert len(list(tmp_path.glob("data-*"))) == 2  # a power cut may bring the old manifest back
    save_value(tmp_path, 3.0)
    assert len(list(tmp_path.glob("data-*"))) == 1


SAVER = """
import sys
from pathlib import Path
from tests.checkpoint.test_folder import save_value
value = 0.0
while True:
    value += 1
    save_value(Path(sys.argv[1]), value)
    print(value, flush=True)
"""


@pytest.mark.slow
def test_a_process_killed_in_a_loop_of_saves_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1.0\n"
    time.sleep(random.Random().uniform(0.01, 0.2))
    process.send_signal(signal.SIGKILL)
    done = float(["1.0", *process.stdout.read().split()][-1])
    process.stdout.close()
    process.wait()
    assert value_in(tmp_path) in (done, done + 1)
    save_value(tmp_path, -5.0)
    assert value_in(tmp_path) == -5.0
    assert len(os.listdir(tmp_path)) == 2


# Overwriting, other folders, other people's files


def test_a_checkpoint_is_made_replaced_moved_and_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (1.0, 2.0):
        save_value(Path("runs/a/last"), value)
        assert value_in(Path("runs/a/last")) == value
        assert len(os.listdir("runs/a/last")) == 2
    shutil.copytree("runs/a/last", "copied")
    Path("runs/a/last").rename("moved")
    assert value_in(Path("copied")) == value_in(tmp_path / "moved") == 2.0
    Path("link").symlink_to("moved")
    save_value(Path("link"), 3.0)
    assert value_in(Path("moved")) == 3.0
    manifest = Path("moved/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-10])
    save_value(Path("moved"), 4.0)  # a damaged one is replaced
    assert value_in(Path("moved")) == 4.0
    assert len(os.listdir("moved")) == 2


def test_files_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_value(tmp_path, 1.0)
    for name in ("notes.txt", "data-12345678/mine.txt", "data-zzzzzzzz/weights.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "data-00000000").symlink_to(tmp_path / "data-zzzzzzzz")
    names = iter(["12345678", "00000002", "00000003"])  # the first is taken
    monkeypatch.setattr("secrets.token_hex", lambda _: next(names))
    save_value(tmp_path, 2.0)
    assert value_in(tmp_path) == 2.0
    assert checkpoint.read_manifest(tmp_path).data == "data-00000002"
    for name in ("notes.txt", "data-12345678/mine.txt", "data-00000000/weights.safetensors"):
        assert (tmp_path / name).read_text() == "mine"


def test_a_folder_that_is_another_programs_a_file_or_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    with pytest.raises(CheckpointError, match=r"its 'manifest.json' is not one of samo; choose"):
        save_value(tmp_path, 1.0)
    assert os.listdir(tmp_path) == ["manifest.json"]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot save to '.*file': '.*file': File exists"):
        save_value(tmp_path / "file", 1.0)
    with pytest.raises(CheckpointError, match=r"cannot save to '.*deeper': '.*file': File exists"):
        save_value(tmp_path / "file" / "deeper", 1.0)
    save_value(tmp_path / "last", 1.0)
    with (
        atomic_io.locked(tmp_path / "last"),
        pytest.raises(
            CheckpointError, match="another process or thread is saving there; give each"
        ),
    ):
        save_value(tmp_path / "last", 2.0)
    assert value_in(tmp_path / "last") == 1.0


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
    for i in range(80):
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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    compressed_checkpoint(tmp_path)
    for file in sorted(tmp_path.glob("data-*/*")):
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=f"'{file}' is missing; take another copy"):
            checkpoint.verify(tmp_path)
        file.mkdir()
        with pytest.raises(CheckpointError, match=f"'{file}' is damaged: it is not a file"):
            checkpoint.verify(tmp_path)
        file.rmdir()
        file.write_bytes(data)
    checkpoint.verify(tmp_path)


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, message in [
        ("none", "it does not exist"),
        ("file", "it is not a folder"),
        (".", "there is no '.*manifest.json'"),
    ]:
        with pytest.raises(CheckpointError, match=f"is not a checkpoint: {message}; write one"):
            samo.load(tmp_path / name, model_of(0.0))


@pytest.mark.parametrize("name", ["manifest.json", "data-*/weights.safetensors"])
def test_a_file_that_cannot_be_read_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_value(tmp_path, 1.0)
    (file,) = tmp_path.glob(name)
    real = open

    def deny(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(path) == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", deny)
    with pytest.raises(CheckpointError, match=f"'{file}' cannot be read: Permission denied; check"):
        checkpoint.verify(tmp_path)


# Strangers


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and give it a new checksum."""
    content = manifests.read_content(path)
    change(content)
    (path / "manifest.json").write_bytes(manifests.encode_manifest(content))


def forge_file(path: Path, name: str, data: bytes) -> None:
    found = checkpoint.read_manifest(path)
    (path / found.data / name).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(path, lambda content: content["files"].update({name: entry}))


def put(*keys: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


ENTRY = {"bytes": 1, "sha256": "0" * 64}

FORGERIES = [
    put("data", value="../elsewhere"),
    put("data", value="data-\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661"),
    put("data", value=None),
    put("files", value=[]),
    put("files", "/etc/passwd", value=ENTRY),
    put("files", "../weights.safetensors", value=ENTRY),
    put("files", "weights.safetensors\n", value=ENTRY),
    put("files", "weights.safetensors", value=None),
    put("files", "weights.safetensors", "bytes", value=-1),
    put("files", "weights.safetensors", "bytes", value=True),
    put("files", "weights.safetensors", "bytes", value=2**70),
    put("files", "weights.safetensors", "sha256", value="00"),
    put("time", value="yesterday"),
    put("samo", value=None),
    put("model", value=3),
    put("model", "num_params", value="many"),
    put("model", "is_compressed", value=1),
    put("model", "tied", value={"a": 1}),
    put("extra", value=[]),
    put("extra", value={"$float": "nan"}),
    put("extra", "a", value={"$float": "one"}),
    put("extra", "a", value={"$tensor": 3}),
    put("extra", value={"$x": 1}),
    put("scaler", value=3),
    put("optimizers", value={}),
    put("optimizers", 0, "class", value=None),
    put("optimizers", 0, "groups", value={}),
    put("optimizers", 0, "groups", value=[3]),
    put("optimizers", 0, "groups", value=[{"names": "ab", "settings": {}}]),
    put("optimizers", 0, "groups", value=[{"names": [1], "settings": {}}]),
    put("optimizers", 0, "groups", value=[{"names": [], "settings": 3}]),
    put("optimizers", 0, "state", value={"0.weight": 3}),
    put("optimizers", 0, "more", value=3),
    lambda content: content.pop("model"),
    lambda content: content.pop("optimizers"),
    put("format", value="another"),
    put("version", value="3"),
]


def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    model, opt = compressed_checkpoint(tmp_path)
    good = (tmp_path / "manifest.json").read_bytes()
    for number, change in enumerate(FORGERIES):
        (tmp_path / "manifest.json").write_bytes(good)
        forge(tmp_path, change)
        with pytest.raises(CheckpointError) as caught:
            samo.load(tmp_path, model, opt)
        assert "manifest.json' is damaged: its contents make no sense" in str(caught.value), number


def with_checksum(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text},\n"checksum": "{digest}"\n}}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it does not match its checksum, or samo did not write it"),
        ('{"format": "samo-checkpoint"}', "it does not match its checksum"),
        (with_checksum("") + " ", "it does not match its checksum"),
        (with_checksum(""), "its contents make no sense"),
        (with_checksum('{"format": "samo-checkpoint"'), "its contents make no sense"),
        (with_checksum('{"a":' * 100_000), "its contents make no sense"),
        (with_checksum('{"a": ' + "9" * 10_000), "its contents make no sense"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_what_is_not_a_manifest_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"manifest.json' is damaged: {message}"):
        checkpoint.read_manifest(tmp_path)


@pytest.mark.parametrize("depth", [250, 400, 100_000])
def test_values_deeper_than_python_can_follow_are_refused(depth: int, tmp_path: Path) -> None:
    save_value(tmp_path, 1.0)
    forge(tmp_path, put("extra", "deep", value="HERE"))
    text = (tmp_path / "manifest.json").read_text().rpartition(',\n"checksum"')[0]
    text = text.replace('"HERE"', "[" * depth + "]" * depth)
    (tmp_path / "manifest.json").write_text(with_checksum(text))
    if depth <= 250:
        assert "deep" in checkpoint.read_manifest(tmp_path).extra
    else:
        with pytest.raises(CheckpointError, match=r"manifest.json' is damaged"):
            checkpoint.read_manifest(tmp_path)


def test_a_manifest_of_another_version_size_or_wording_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_value(tmp_path, 1.0)
    forge(tmp_path, put("version", value=4))
    with pytest.raises(CheckpointError, match="has version 4, this samo reads version 3; update"):
        checkpoint.read_manifest(tmp_path)
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    with pytest.raises(CheckpointError, match="does not match its checksum, or samo did not"):
        checkpoint.read_manifest(tmp_path)
    monkeypatch.setattr(manifests, "MAX_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"is damaged: it has more than 100 bytes"):
        checkpoint.read_manifest(tmp_path)


def forge_tensors(path: Path, kind: str, change: dict[str, Tensor | None]) -> None:
    saved = SavedTensors(path, checkpoint.read_manifest(path), kind)
    changed = {name: saved.read(name).clone() for name in saved.specs} | change
    kept = {name: value for name, value in changed.items() if value is not None}
    forge_file(path, f"{kind}.safetensors", save_tensors(kept))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("weights", {"0.weight": torch.zeros(33)}, "'0.weight' has shape"),
        ("optimizer", {"0.weight/exp_avg": torch.zeros(5)}, "the optimizer's exp_avg of '0.weight' is"),
        ("optimizer", {"0.weight/step": torch.zeros(5)}, "the optimizer's state of '0.weight' is"),
        ("optimizer", {"0.weight/exp_avg": torch.zeros(32).half()}, "optimizer's state of '0.weight' is"),
        ("optimizer", {"x": torch.zeros(5)}, "state names 12 tensors, which are not the 13"),
        ("optimizer", {"0.weight/step": None}, "state names 12 tensors, which are not the 11"),
        ("extra", {"x": torch.zeros(5)}, "its extra tensors are not those that its manifest names"),
        ("extra", {"tensor": None, "a": torch.zeros(1)}, "its extra tensors are not those that its"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_before_a_kernel_sees_them(
    kind: str, change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    model, opt = compressed_checkpoint(tmp_path)
    forge_tensors(tmp_path, kind, change)
    with pytest.raises(CheckpointError, match=message):
        samo.load(tmp_path, model, opt)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["0.weight", "step"], 3, "state names 11 tensors, which are not the 12"),
        (["0.weight"], {}, "state names 9 tensors, which are not the 12"),
        (["0.weight", "more"], {"$tensor": "0.weight/exp_avg"}, "state names 12 tensors, which are not the 12"),
        (["0.weight", "more"], 1, "the optimizer's state of '0.weight' is"),
        (["0.weight", "exp_avg"], [{"$tensor": "0.weight/exp_avg"}], "the optimizer's state of '0.w"),
        (["ghost"], {"a": 1}, "it has optimizer state of 'ghost', which is in none of its groups"),
    ],
)  # fmt: skip
def test_optimizer_state_that_refers_to_the_wrong_things_is_refused(
    keys: list[str], value: Any, message: str, tmp_path: Path
) -> None:
    model, opt = compressed_checkpoint(tmp_path)
    forge(tmp_path, put("optimizers", 0, "state", *keys, value=value))
    with pytest.raises(CheckpointError, match=message):
        samo.load(tmp_path, model, opt)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (save_tensors({"weight": torch.ones(5, 6)}), "its tensor 'weight' is there twice, or rows"),
        (save_tensors({"weight": torch.ones(2)}), "its 'weight' is torch.float32 .*elsewhere"),
        (save_tensors({"x": torch.ones(2)}, {"rows": '{"x": [3, 5]}'}), "rows of it are missing"),
        (save_tensors({"x": torch.ones(2)}, {"rows": '{"x": 3}'}), "it is not a safetensors file"),
        (
            save_tensors({"x": torch.ones(2)}, {"rows": '{"x": [0.0, 2.0]}'}),
            "it is not a safetensors",
        ),
        (save_tensors({"x": torch.ones(2)}, {"rows": "[]"}), "it is not a safetensors file"),
        (
            save_tensors({"x": torch.ones(2)}, {"rows": "[" * 10_000}),
            "it is not a safetensors file",
        ),
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
        with pytest.raises(CheckpointError, match=r"masks.safetensors' is damaged: mask file"):
            samo.load(tmp_path, model, opt)


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
    assert (found.version, found.samo_version, found.dtype) == (3, samo.__version__, "float32")
    assert (found.is_compressed, found.num_params, found.kept) == (False, 35, 35)
    assert (found.extra, found.extra_tensors) == ({"value": 1.0}, ("tensor",))
    assert (found.optimizers, found.scaler) == ((), None)


def test_a_copy_shares_its_files_and_outlives_the_original(tmp_path: Path) -> None:
    save_value(tmp_path / "last", 1.0)
    save_value(tmp_path / "best", 0.0)
    checkpoint.copy(tmp_path / "last", str(tmp_path / "best"))
    nodes = [{f.stat().st_ino for f in (tmp_path / n).glob("data-*/*")} for n in ("last", "best")]
    assert nodes[0] == nodes[1]
    assert len(list((tmp_path / "best").iterdir())) == 2
    a, b = (checkpoint.verify(tmp_path / n) for n in ("last", "best"))
    assert (a.time, a.files, a.extra) == (b.time, b.files, b.extra)
    save_value(tmp_path / "last", 2.0)
    assert (value_in(tmp_path / "last"), value_in(tmp_path / "best")) == (2.0, 1.0)
    shutil.rmtree(tmp_path / "last")
    assert value_in(tmp_path / "best") == 1.0
    (tmp_path / "link").symlink_to("best")
    with pytest.raises(ValueError, match=r"cannot copy checkpoint '.*best' onto itself; give"):
        checkpoint.copy(tmp_path / "best", tmp_path / "link")


def no_links(*_: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "full")


def test_a_copy_without_links_is_checked_and_a_failed_one_leaves_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, best = tmp_path / "last", tmp_path / "best"
    save_value(last, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_links)
        checkpoint.copy(last, best)
        assert value_in(best) == 1.0
        file = next(last.glob("data-*/weights.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        with pytest.raises(CheckpointError, match=f"'{file}' is damaged: its bytes do not match"):
            checkpoint.copy(last, best)
        patch.setattr(os, "link", full)
        with pytest.raises(CheckpointError, match=r"cannot save to '.*best': .*full"):
            checkpoint.copy(last, best)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"weights.safetensors' is missing"):
        checkpoint.copy(last, best)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.copy(tmp_path / "none", best)
    assert value_in(best) == 1.0
    assert len(list(best.iterdir())) == 2
