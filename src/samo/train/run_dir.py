"""A run folder: everything that a run writes.

run.json            settings, versions, hardware: what was run, where
metrics.jsonl       what happened, a line each
hugging-face/       config and tokenizer of the model, of samo finetune
model/              the trained model, compressed, once samo finetune is complete
checkpoints/last    the newest checkpoint, to resume from
checkpoints/best    the one with the lowest validation loss since pruning
checkpoints/step-N  the ones before the last, if several are to be kept
data/               tokens, where a tokenizer made them
tensorboard/        event files, where TensorBoard is installed
report.html         the report, as ``samo report`` makes it
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from samo.checkpoint import copy, read_manifest, remove
from samo.checkpoint.manifest import NAME
from samo.errors import CheckpointError, ConfigError, RunError
from samo.train.config_io import from_dict
from samo.train.finetune_config import KINDS, Config
from samo.utils import atomic_io, untrusted

FORMAT: Final = "samo-run"
VERSION: Final = 1
_NAMES: Final = (
    *("run.json", "metrics.jsonl", "report.html"),
    *("checkpoints", "data", "tensorboard", "last", "best", "hugging-face", "model", ".draft"),
)
_MAX_BYTES: Final = 2**24


class RunDir:
    """One run folder, locked by the process that trains in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.last = path / "checkpoints" / "last"
        self.best = path / "checkpoints" / "best"
        self._lock = ExitStack()
        self._locked: int | None = None  # descriptor of the locked folder

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint is complete: the manifest is the last file to be written."""
        return any((path / NAME).exists() for path in (self.last, self.best))

    def kept(self, step: int) -> Path:
        """Return the place of a checkpoint that is kept besides the last one."""
        return self.last.with_name(f"step-{step}")

    def remove_kept(self, *, all_but: int, up_to: int | None = None) -> None:
        """Remove the kept checkpoints but the newest ones, and those after step ``up_to``."""
        found = {}
        for path in self.last.parent.glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isascii() and number.isdigit():
                found[int(number)] = path
        steps = sorted(step for step in found if up_to is None or step <= up_to)
        newest = steps[max(len(steps) - all_but, 0) :]
        for step, path in found.items():
            if step not in newest:
                remove(path)

    def restore_best(self, step: int | None, *, up_to: int) -> bool:
        """Replace a best checkpoint after step ``up_to`` by that of ``step``, or remove it.

        A run that resumes from an older checkpoint drops later steps. False means removed.
        """
        try:
            progress = read_manifest(self.best).extra.get("progress")
        except CheckpointError:  # there is none, or it is damaged, and nothing depends on it
            return True
        found = progress.get("step") if isinstance(progress, dict) else None
        if type(found) is not int or found <= up_to:
            return True
        if step is None or not (self.kept(step) / NAME).exists():
            remove(self.best)
            return False
        copy(self.kept(step), self.best)
        return True

    @classmethod
    def create(cls, path: Path) -> "RunDir":
        """Make a new run folder, or take an empty one, and lock it."""
        check_free(path)
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
        run = cls(path)
        run.lock()
        return run

    @classmethod
    def find(cls, path: Path) -> "RunDir":
        """Return the folder of a run, given by its path or that of a checkpoint; not locked."""
        is_checkpoint = path.parent.name == "checkpoints" and not (path / "run.json").exists()
        run = cls(path.parent.parent if is_checkpoint else path)
        run.check_is_run()
        run._check_own()
        return run

    def check_is_run(self) -> None:
        """Refuse a folder that no run has made."""
        if self.run_file.is_file():
            return
        found = "has no run.json" if self.path.exists() else "does not exist"
        runs = [f"'{file.parent}'" for file in sorted(self.path.glob("*/run.json"))]
        hint = "a folder that samo train or samo finetune made (--out)"
        hint = f"its runs: {', '.join(runs[:3])}" if runs else hint
        raise RunError(f"'{self.path}' is not a run folder: it {found}; pass {hint}")

    def _check_own(self) -> None:
        """Refuse links, pipes and devices that the run would read, or write through."""
        for place in (self.path, self.last.parent):
            for name in (*_NAMES, *(kept.name for kept in place.glob("step-*"))):
                with suppress(FileNotFoundError):
                    mode = (place / name).lstat().st_mode
                    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                        raise RunError(
                            f"'{place / name}' is a link, a pipe or a device, and a run uses files "
                            "in its own folder only; replace it with its target"
                        )

    def lock(self) -> None:
        """Keep other processes out until this one closes the folder or ends."""
        try:
            with _writing(self.path, "make it writable"):
                self._locked = self._lock.enter_context(atomic_io.locked(self.path))
        except BlockingIOError:
            raise RunError(
                f"another process is training in '{self.path}'; wait for it, or use another folder"
            ) from None
        for leftover in self.path.glob(".run.json.????????"):  # of a kill
            leftover.unlink(missing_ok=True)

    def check_in_place(self) -> None:
        """Refuse to write if the path no longer leads to the locked folder."""
        if self._locked is None:
            return
        try:
            is_same = os.path.samestat(os.fstat(self._locked), self.path.stat())
        except OSError:
            is_same = False
        if not is_same:
            raise RunError(
                f"'{self.path}' was moved or removed while the run was training in it; resume the "
                "folder where it is now with --resume"
            )

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()
        self._locked = None

    def write_run(self, record: dict[str, Any]) -> None:
        """Write run.json."""
        content = {"format": FORMAT, "version": VERSION, **record}
        with _writing(self.path):
            atomic_io.write_bytes(self.run_file, json.dumps(content, indent=2).encode())

    def read_run(self) -> dict[str, Any]:
        """Read run.json."""
        try:
            record = untrusted.parse_json(untrusted.read_file(self.run_file, _MAX_BYTES))
        except (OSError, ValueError) as error:
            raise RunError(
                f"'{self.run_file}' cannot be read: {error}; take another copy of the run"
            ) from None
        found = record if isinstance(record, dict) else {}
        if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
            raise RunError(
                f"'{self.run_file}' has format {found.get('format')!r}, version "
                f"{found.get('version')!r}; this samo reads {FORMAT!r}, version {VERSION}"
            )
        return found

    def config(self) -> Config:
        """Return the settings that run.json records."""
        record = self.read_run()
        kind = record.get("kind", "train")
        if kind not in list(KINDS):  # a stranger's may be unhashable
            raise RunError(
                f"'{self.run_file}' is of a run of 'samo {str(kind)[:40]}', which this samo does "
                f"not know; it knows {', '.join(KINDS)}"
            )
        return from_dict(KINDS[kind], record.get("config"), source=f"'{self.run_file}'")


def check_free(path: Path) -> None:
    """Refuse a folder that a new run cannot use."""
    if (path / "run.json").exists():
        raise RunError(
            f"'{path}' already holds a run; resume it (samo {kind_of(path)} --resume {path}), or "
            "choose another folder with --out"
        )
    with _writing(path):
        found = {entry.name for entry in path.iterdir()} if path.exists() else set()
    # The exceptions are left by a start that was killed.
    others = {n for n in found - {"data", "hugging-face"} if not n.startswith(".run.json.")}
    if others:
        raise RunError(f"'{path}' is not empty (it holds '{min(others)}'); choose another --out")


def kind_of(path: Path) -> str:
    """Return the command that started a run."""
    try:
        return RunDir(path).config().kind
    except (RunError, ConfigError):
        return "train"


def free_dir(parent: Path, name: str) -> Path:
    """Return the first of ``name``, ``name-2``, ``name-3``, ... that does not exist."""
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


@contextmanager
def _writing(path: Path, advice: str = "choose another --out") -> Iterator[None]:
    """Turn an error of the system into one that names the folder."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise RunError(f"cannot write to '{path}': {error.strerror}; {advice}") from None
