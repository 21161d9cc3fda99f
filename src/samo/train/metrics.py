"""The record of a run: ``metrics.jsonl``, and TensorBoard's event files where that is installed."""

import importlib.util
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from samo.errors import RunError
from samo.train import events
from samo.train.events import Event

__all__ = []

_logger = logging.getLogger(__name__)


class MetricsFile:
    """Writes events as lines of JSON, each of them whole or not at all.

    Args:
        path: The file; created if it is not there.
        size: Bytes that are valid, None for all; what lies behind was written after the checkpoint a
            run goes on from, and is dropped, and so is a line that was cut by a kill.
        on_error: Whether a line that cannot be written ends the run.
    """

    def __init__(
        self, path: Path, *, size: int | None, on_error: Literal["stop", "continue"]
    ) -> None:
        self._path = path
        self._on_error = on_error
        try:
            self._file = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: SIM115
            there = self._file.read()
            self.size = there[:size].rfind(b"\n") + 1
            self._file.truncate(self.size)
            self._file.seek(self.size)
        except OSError as error:
            raise RunError(f"cannot write metrics to '{path}': {error.strerror}") from error

    def on(self, event: Event) -> None:
        """Write an event.

        Raises:
            RunError: The line could not be written, and the run is to stop then.
        """
        if type(event) not in events.NAMES:
            return
        line = event.to_json().encode() + b"\n"
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(28, "No space left on device")
            self.size += len(line)
        except OSError as error:
            message = f"cannot write metrics to '{self._path}': {error.strerror}"
            self._file.truncate(self.size)
            self._file.seek(self.size)
            if self._on_error == "stop":
                raise RunError(f"{message}; make room, then go on with --resume") from error
            _logger.warning("%s; the line is dropped", message)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RankFile:
    """Writes what one rank other than the first has to tell: its traffic, memory and state.

    Args:
        path: The file.
        step: Where the run stands; lines of later steps are dropped.
        on_error: Whether a line that cannot be written ends the run.
    """

    def __init__(self, path: Path, *, step: int, on_error: Literal["stop", "continue"]) -> None:
        size = 0
        with suppress(OSError), open(path, "rb") as file:
            for line in file:
                if _step_of(line) > step:
                    break
                size += len(line)
        self._file = MetricsFile(path, size=size, on_error=on_error)

    def on(self, event: Event) -> None:
        """Write an event, if it is of this rank's own.

        Raises:
            RunError: The line could not be written, and the run is to stop then.
        """
        if isinstance(event, events.Started | events.Exchanged | events.Accounted | events.Ended):
            self._file.on(event)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class Board:
    """Writes losses, learning rate and speed as TensorBoard shows them."""

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps that were taken after the checkpoint a run goes on from are hidden.
        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def on(self, event: Event) -> None:
        """Write an event."""
        match event:
            case events.Stepped():
                for name in ("loss", "lr", "grad_norm", "tokens_per_s", "memory_bytes"):
                    self._writer.add_scalar(f"train/{name}", getattr(event, name), event.step)
            case events.Evaluated():
                self._writer.add_scalar("valid/loss", event.valid_loss, event.step)
                self._writer.add_scalar("valid/perplexity", event.perplexity, event.step)
            case events.Observed() if event.largest is not None:
                self._writer.add_scalar("masks/distance", event.largest, event.step)
            case events.Remapped():
                self._writer.add_scalar("masks/sparsity", event.sparsity, event.step)
                self._writer.add_scalar("masks/dropped", event.dropped, event.step)
            case events.Accounted():
                self._writer.add_scalar("state/bytes", event.measured_bytes, event.step)
            case events.Sampled():
                self._writer.add_text("sample", f"<pre>{event.text}</pre>", event.step)
            case events.Ended():
                self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


def has_tensorboard() -> bool:
    """Return whether TensorBoard's event files can be written here."""
    return importlib.util.find_spec("tensorboard") is not None
