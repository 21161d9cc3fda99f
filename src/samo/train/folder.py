"""A run folder: where everything that a run writes lies.

run.json            settings, versions, hardware: what was run, where
metrics.jsonl       what happened, a line each
metrics.rankN.jsonl  on many ranks: traffic, memory and state of rank N
masks.safetensors   the masks, from pruning on, as they are now
checkpoints/last    the newest checkpoint, to go on from
checkpoints/best    the one with the lowest validation loss since pruning
data/               tokens, where a tokenizer made them
tensorboard/        event files, where TensorBoard is installed
report.html         the report, as ``samo report`` makes it
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from samo.checkpoint.manifest import NAME
from samo.errors import RunError
from samo.train.config import TrainConfig
from samo.train.config_files import from_dict
from samo.utils import atomic_io

__all__ = []

FORMAT: Final = "samo-run"
VERSION: Final = 1


class RunFolder:
    """One run folder; the process that trains in it locks it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = ExitStack()

    @property
    def run_file(self) -> Path:
        """Settings, versions, hardware."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """What happened."""
        return self.path / "metrics.jsonl"

    def rank_metrics(self, rank: int) -> Path:
        """What another rank than the first has to tell."""
        return self.path / f"metrics.rank{rank}.jsonl"

    @property
    def masks(self) -> Path:
        """The masks."""
        return self.path / "masks.safetensors"

    @property
    def last(self) -> Path:
        """The newest checkpoint."""
        return self.path / "checkpoints" / "last"

    @property
    def best(self) -> Path:
        """The checkpoint with the lowest validation loss."""
        return self.path / "checkpoints" / "best"

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint was ever written: a manifest, its last file, makes it one."""
        return any((path / NAME).exists() for path in (self.last, self.best))

    @classmethod
    def create(cls, path: Path) -> "RunFolder":
        """Make a new run folder, or take an empty one, and lock it.

        Raises:
            RunError: There is something in it already, or it cannot be written to.
        """
        check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(path, error) from None
        folder = cls(path)
        folder.lock()
        return folder

    @classmethod
    def find(cls, path: Path) -> "RunFolder":
        """Return the folder of a run, found by itself or by one of its checkpoints; not locked.

        Raises:
            RunError: It is no run folder.
        """
        is_checkpoint = path.parent.name == "checkpoints" and not (path / "run.json").exists()
        folder = cls(path.parent.parent if is_checkpoint else path)
        if not folder.run_file.is_file():
            what = "has no run.json" if path.is_dir() else "does not exist"
            if path.is_file():
                what = "is a file"
            raise RunError(
                f"'{path}' is not a run folder: it {what}; --resume takes the folder that samo train "
                "made (--out)"
            )
        return folder

    def lock(self) -> None:
        """Keep other processes out until this one closes the folder or ends.

        Raises:
            RunError: Another process is training there.
        """
        try:
            self._held.enter_context(atomic_io.locked(self.path))
        except BlockingIOError:
            raise RunError(
                f"another process is training in '{self.path}'; wait for it, or choose another folder"
            ) from None
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def close(self) -> None:
        """Let other processes in."""
        self._held.close()

    def write_run(self, record: dict[str, Any]) -> None:
        """Write run.json.

        Raises:
            RunError: It cannot be written.
        """
        content = {"format": FORMAT, "version": VERSION, **record}
        try:
            atomic_io.write_bytes(self.run_file, json.dumps(content, indent=2).encode())
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def read_run(self) -> dict[str, Any]:
        """Read run.json.

        Raises:
            RunError: It is damaged or of another version.
        """
        try:
            record = json.loads(self.run_file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(
                f"'{self.run_file}' cannot be read: {error}; it is the JSON that 'samo train' writes at "
                "its start, take another copy of the run"
            ) from None
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise RunError(
                f"'{self.run_file}' is not the record of a run (format {FORMAT!r}); pass a folder that "
                "'samo train' wrote"
            )
        if record.get("version") != VERSION:
            raise RunError(
                f"'{self.run_file}' has version {record.get('version')!r}, this samo reads version "
                f"{VERSION}; use the samo it was written with, or update samo"
            )
        return record

    def config(self) -> TrainConfig:
        """Return the resolved settings that run.json records."""
        return from_dict(self.read_run().get("config"), source=f"'{self.run_file}'")


def check_free(path: Path) -> None:
    """Refuse a folder that a new run cannot have.

    Raises:
        RunError: There is something in it already, or it is none.
    """
    if (path / "run.json").exists():
        raise RunError(
            f"'{path}' already holds a run; go on with it (samo train --resume {path}), or choose "
            "another folder with --out"
        )
    if path.is_file():
        raise RunError(f"'{path}' is a file; --out takes a folder for the run, new or empty")
    try:
        found = [] if not path.exists() else [entry.name for entry in path.iterdir()]
    except OSError as error:
        raise _cannot_write(path, error) from None
    others = [
        name for name in found if name not in ("data", "run.lock")
    ]  # what a killed start leaves
    if others:
        raise RunError(
            f"'{path}' is not empty (it holds '{min(others)}'); choose a new folder with --out"
        )


def free_folder(parent: Path, name: str) -> Path:
    """Return the first folder of ``name``, ``name-2``, ``name-3``, ... that does not exist.

    Example:
        >>> import pathlib
        >>> from samo.train.folder import free_folder
        >>> free_folder(pathlib.Path("no-such-folder"), "notes").as_posix()
        'no-such-folder/notes'
    """
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot write to '{path}': {error.strerror}; choose another folder with --out")
