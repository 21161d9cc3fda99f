"""Where the events of a run go: ``metrics.jsonl``, TensorBoard if it is installed, W&B if asked."""

import importlib.util
import logging
import os
from collections.abc import Iterable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final

from samo.errors import RunError
from samo.train import events
from samo.train.config_io import to_dict
from samo.train.events import Event, Listener
from samo.train.finetune_config import Config

_logger = logging.getLogger(__name__)

_MAX_LINE: Final = 2**20


class MetricsFile:
    """Appends events as lines of JSON, each of them whole or not at all.

    The first ``size`` bytes are valid, None for all. The rest was written after the checkpoint that
    the run resumes from and is dropped, as is a line cut by a kill.
    """

    def __init__(self, path: Path, *, size: int | None) -> None:
        self._path = path
        try:
            # Unbuffered: readers see every event at once, and a kill loses none.
            self._file = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: SIM115
            end = self._file.seek(0, os.SEEK_END)
            end = end if size is None else min(end, size)
            start = self._file.seek(max(end - _MAX_LINE, 0))
            self.size = start + self._file.read(end - start).rfind(b"\n") + 1
            self._cut()
        except OSError as error:
            raise RunError(f"cannot write metrics to '{path}': {error.strerror}") from error

    def on(self, event: Event) -> None:
        """Write an event."""
        if type(event) not in events.NAMES:
            return
        line = event.to_json().encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(28, "No space left on device")
            self.size += len(line)
        except OSError as error:
            self._cut()
            raise RunError(
                f"cannot write metrics to '{self._path}': {error.strerror}; free some space, then "
                "resume with --resume"
            ) from error

    def _cut(self) -> None:
        self._file.truncate(self.size)
        self._file.seek(self.size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Writes losses, learning rate, speed and masks as TensorBoard's event files."""

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides steps that were taken after the checkpoint that a run resumes from.
        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def on(self, event: Event) -> None:
        """Write an event."""
        if isinstance(event, events.Sampled):
            self._writer.add_text("sample", f"<pre>{event.prompt}{event.text}</pre>", event.step)
        for name, value in _scalars(event).items():
            self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        """Write what is buffered, and close the files."""
        with suppress(OSError):  # a full disk must not end the run
            self._writer.close()


class WandB:
    """Sends the same numbers to a project of Weights & Biases."""

    def __init__(self, project: str, folder: Path, config: dict[str, Any], run_id: str) -> None:
        import wandb

        name = folder.resolve().name
        self._run: Any = wandb.init(
            project=project,
            name=name,
            id=f"{name}-{run_id}",  # a run that resumes goes on in its charts, and no other does
            resume="allow",
            dir=str(folder),
            config=config,
        )
        self.close = self._run.finish

    def on(self, event: Event) -> None:
        """Send an event."""
        if values := _scalars(event):
            self._run.log(values, step=event.step)


class Reporter:
    """Passes the events of a run to its listeners; one that cannot write is removed."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self._listeners = list(listeners)
        self._files = ExitStack()
        self._metrics: MetricsFile | None = None

    def open_files(
        self, folder: Path, *, step: int, size: int | None, config: Config, run_id: str
    ) -> None:
        """Open the metrics file, TensorBoard's if it is installed, and W&B if it is asked for."""
        self._metrics = self._open(MetricsFile(folder / "metrics.jsonl", size=size))
        if is_installed("tensorboard"):
            try:
                self._open(TensorBoard(folder / "tensorboard", step=step))
            except OSError as error:
                _logger.warning("TensorBoard gets no events: %s", error)
        if config.run.wandb is not None:
            self._open(WandB(config.run.wandb, folder, to_dict(config), run_id))

    def _open(self, listener: Any) -> Any:
        self._listeners.append(self._files.enter_context(closing(listener)))
        return listener

    @property
    def metrics_bytes(self) -> int:
        """The size of the metrics file; 0 where it is not open."""
        return 0 if self._metrics is None else self._metrics.size

    def on(self, event: Event) -> None:
        """Pass an event on."""
        for listener in list(self._listeners):
            try:
                listener.on(event)
            except OSError as error:  # a closed pipe or a full disk must not end the run
                self._listeners.remove(listener)
                _logger.warning("%s gets no more events: %s", type(listener).__name__, error)

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def is_installed(package: str) -> bool:
    """Return whether a package is there; a folder of that name, such as W&B's own, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event that make a curve."""
    values: dict[str, float | None] = {}
    match event:
        case events.Stepped():
            names = ("loss", "lr", "grad_norm", "tokens_per_s", "memory_bytes")
            values = {f"train/{name}": getattr(event, name) for name in names}
        case events.Evaluated():
            values = {"valid/loss": event.valid_loss, "valid/perplexity": event.perplexity}
        case events.Observed():
            values = {"masks/distance": event.largest}
        case events.Remapped():
            values = {"masks/sparsity": event.sparsity, "masks/dropped": event.dropped}
        case events.Accounted():
            values = {"state/bytes": event.measured_bytes}
    return {name: value for name, value in values.items() if value is not None}
