"""The command ``samo``: what can be typed, and where each command lives.

Flags come from the same dataclasses as the Python API (`samo.train.config`). Nothing heavy is imported until
the command is known, so that help is there at once.
"""

import importlib
import io
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final, Literal

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, arg, subcommand
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
)

from samo import __version__
from samo.bench.settings import KernelsConfig, StepConfig
from samo.errors import ConfigError, PeerError, SamoError
from samo.train.config import Auto, OptionalPath, TrainConfig
from samo.train.config_files import read_toml
from samo.train.config_mesh import in_any_grid, with_stages

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """Show the whole story on a laptop CPU in two minutes: train, prune 90 %, train on, compare."""

    out: OptionalPath = None
    """Folder to write to; runs/demo if nothing is said, or runs/demo-2 and so on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Train(TrainConfig):
    """Train a GPT on your text: densely at first, then pruned, with compressed state."""

    config: OptionalPath = None
    """TOML file with settings; a flag that is given wins over it."""
    resume: OptionalPath = None
    """Go on with the run in this folder."""
    out: OptionalPath = None
    """Folder for the run; if nothing is said runs/NAME-OF-THE-TEXT, with -2, -3 behind it if need be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Start a command of samo on several ranks of this machine: samo launch -n 4 train notes.txt."""

    command: Annotated[Positional[tuple[str, ...]], arg(metavar="COMMAND ...")]
    """The command and its flags, without the word samo."""
    num_ranks: Annotated[int, arg(aliases=("-n",))] = 2
    """Processes to start; with GPUs, one for each."""
    max_restarts: int = 0
    """How often to start all ranks again after one has failed; they go on from the last checkpoint."""
    logs: OptionalPath = None
    """Folder for what ranks other than the first say; if nothing is said it is shown when one fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prune:
    """Choose the weights to keep of a checkpoint, a run or a Hugging Face model folder."""

    source: Positional[Path]
    """A checkpoint, a run folder, or a folder with config.json and model weights."""
    out: Path = Path("masks.safetensors")
    """File to write the masks to."""
    sparsity: float | Auto = "auto"
    """Fraction of the weights to prune; auto: 0.9, or what --pattern prunes."""
    method: Literal["magnitude", "random", "zeros"] = "magnitude"
    """Keep the largest weights, or any; zeros: read the masks off a model that is pruned already."""
    scope: Literal["tensor", "global", "erk"] = "tensor"
    """Prune each matrix to the sparsity, or all of them together; erk: small ones less."""
    pattern: str | None = None
    """Keep n of every m neighbours along the inputs: "2:4" and the like."""
    skip: tuple[str, ...] = ()
    """Patterns of weights to leave whole, such as "blocks.0.*"."""
    rules: dict[str, float] = field(default_factory=dict)
    """Sparsities for single weights: pattern and value, in pairs."""
    seed: int = 0
    """Chooses between weights of equal size."""
    json: bool = False
    """Print the summary as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspect:
    """Look into masks, a checkpoint or a run; without a path, at this machine and its kernels."""

    path: Annotated[Positional[Path | None], arg(metavar="PATH")] = None
    """A mask file, a checkpoint or a run folder."""
    verify: bool = False
    """Read a checkpoint whole, and check every byte of it."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Make one page of a run, or of several to compare: curves, memory, masks."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...")]
    """Run folders."""
    out: OptionalPath = None
    """The page to write; by default report.html in the first run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Measure speed and memory on this machine: of the kernels, of a training step, of sparse products."""

    question: (
        Annotated[KernelsConfig, subcommand("kernels")] | Annotated[StepConfig, subcommand("step")]
    )


Command = Demo | Train | Launch | Prune | Inspect | Report | Bench

_COMMANDS: Final[dict[str, type]] = {
    kind.__name__.lower(): kind for kind in (Demo, Train, Launch, Prune, Inspect, Report, Bench)
}
_MODULES: Final[dict[type, str]] = {
    Demo: "samo.cli.demo",
    Train: "samo.cli.train",
    Launch: "samo.cli.launch",
    Prune: "samo.cli.prune",
    Inspect: "samo.cli.inspect",
    Report: "samo.cli.report",
    Bench: "samo.cli.bench",
}


LAUNCHED: Final = ("train",)
"""Commands that run on many ranks."""
LAUNCH_FLAGS: Final = ("-n", "--num-ranks", "--max-restarts", "--logs")
"""Flags of samo launch itself, each with a value."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 wrong usage.

    Example:
        >>> from samo.cli import main
        >>> main(["inspect", "no-such-file"])
        1
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        sys.stdout.write(f"samo {__version__}\n")
        return 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a name or a sample may not fit the terminal
    _log_to_stderr()
    _share_the_cores()
    try:
        with _leaving_at_once():
            command = parse(arguments or ["--help"])
            module = importlib.import_module(_MODULES[type(command)])
        return int(module.run(command))
    except SamoError as error:
        if not isinstance(error, ConfigError):
            _complain(str(error))
        elif _rank() == "0":  # all ranks have it alike
            _complain(with_flags(str(error)))
        if isinstance(error, PeerError) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _leave_at_once(1)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except BrokenPipeError:  # as in samo inspect | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        _complain(f"{error.filename or 'the system'}: {error.strerror or error}")
        return 1


def parse(arguments: Sequence[str]) -> Command:
    """Return the command that was typed.

    Raises:
        ConfigError: A config file or the record of a run cannot be used.
        SystemExit: An unknown flag (2), or help (0).
    """
    command = _parse(arguments)
    if not isinstance(command, Train) or (command.config is None and command.resume is None):
        return command
    if command.resume is not None:
        for name in ("config", "out"):
            if getattr(command, name) is not None:
                raise ConfigError(
                    f"--resume goes on with a run that has its settings and its folder already; leave "
                    f"out --{name}"
                )
        from samo.train.folder import RunFolder

        base = in_any_grid(RunFolder.find(command.resume).config())
    else:
        assert command.config is not None
        base = read_toml(command.config)
    sections = {entry.name: getattr(base, entry.name) for entry in fields(TrainConfig)}
    # Once more, with the file's settings as defaults: a flag that is given goes before them.
    marked: Any = OmitArgPrefixes[Train]
    again: Train = tyro.cli(
        marked,
        prog="samo train",
        args=arguments[1:],
        default=replace(command, **sections),
        registry=_registry(),
    )
    if (
        command.resume is not None
    ):  # its first reading has what was typed, and usual settings beside
        again = replace(again, mesh=with_stages(again, command.mesh).mesh)
    return again


def _parse(arguments: Sequence[str]) -> Command:
    marked: Any = OmitArgPrefixes[OmitSubcommandPrefixes[Command]]  # type: ignore[misc]
    description = "Train pruned neural networks with a fraction of the memory."
    arguments, behind = _split_launch(arguments)
    kind = _COMMANDS.get(arguments[0])
    if kind is None:
        command: Command = tyro.cli(marked, prog="samo", description=description, args=arguments)
    else:  # by itself, so that what is wrong with it points to its own help
        alone: Any = OmitArgPrefixes[OmitSubcommandPrefixes[kind]]  # type: ignore[misc,valid-type]
        command = tyro.cli(
            alone, prog=f"samo {arguments[0]}", args=arguments[1:], registry=_registry()
        )
    return replace(command, command=behind) if isinstance(command, Launch) and behind else command


def _registry() -> ConstructorRegistry:
    """Return how numbers that may be auto are read: what is neither is said without Python's types."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def number_or_auto(about: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        kinds = [kind for kind in (int, float) if about.type == kind | Auto]
        if not kinds:
            return None
        kind, metavar = kinds[0], f"{kinds[0].__name__.upper()}|{{auto}}"

        def read(words: list[str]) -> int | float | str:
            try:
                return words[0] if words[0] == "auto" else kind(words[0])
            except ValueError:
                what = "a whole number" if kind is int else "a number"
                raise ValueError(f"'{words[0]}' is neither {what} nor the word auto") from None

        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=read,
            is_instance=lambda value: value == "auto" or isinstance(value, kind | int),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _split_launch(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Take what is launched away from the flags of samo launch: its own flags are not for us.

    Example:
        >>> from samo.cli import _split_launch
        >>> _split_launch(["launch", "-n", "4", "train", "notes.txt", "--steps", "9"])
        (['launch', '-n', '4', 'train'], ('train', 'notes.txt', '--steps', '9'))
    """
    ours = list(arguments)
    if ours[:1] != ["launch"]:
        return ours, ()
    place = 1
    while place < len(ours):
        word = ours[place]
        if not word.startswith("-"):
            return ours[: place + 1], tuple(ours[place:])
        has_value = word in LAUNCH_FLAGS  # in the next word, and not behind a "="
        place += 2 if has_value else 1
    return ours, ()


def with_flags(message: str) -> str:
    """Name settings in a message as they are typed: the Python API and files call them by their fields.

    Words that are no names for sure, such as steps, are left alone but for the beginning.

    Example:
        >>> from samo.cli import with_flags
        >>> with_flags("batch_size must be 1 or more")
        '--batch-size must be 1 or more'
        >>> with_flags("steps must be 1 or more; 'run.eval_every' is a key, and takes steps")
        "--steps must be 1 or more; 'run.eval_every' is a key, and takes steps"
    """
    names = [
        entry.name for section in fields(TrainConfig) for entry in fields(_section(section.name))
    ]
    sure = "|".join(name for name in names if "_" in name)
    message = re.sub(rf"(?<![\w.'\"-])({sure})(?![\w.'\"=])", _flag, message)
    return re.sub(rf"^({'|'.join(names)})(?= must )", _flag, message)


def _section(name: str) -> Any:
    return getattr(TrainConfig(), name)


def _flag(found: "re.Match[str]") -> str:
    return "--" + found[0].replace("_", "-")


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process while modules are loaded: some turn the exception into others."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # others may set no handlers, and what is to be ignored is
        return

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, b"samo: interrupted\n")
        os._exit(128 + number)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _log_to_stderr() -> None:
    """Show the warnings of samo, under its name; other libraries speak for themselves."""
    logger = logging.getLogger("samo")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("samo: %(message)s"))
        logger.addHandler(handler)


def _share_the_cores() -> None:
    """Let threads that wait for each other sleep soon, before torch starts them.

    They spin for milliseconds otherwise, which on a machine that has something else to do steals the
    time of those they wait for. A step of the demo on 2 cores, 2026-11-15: 50 ms alone either way (52
    with this), beside one busy process 480 to 1,700 ms, and 125 with this.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def _complain(message: str) -> None:
    rank = "" if int(os.environ.get("WORLD_SIZE", "1")) == 1 else f"rank {_rank()}: "
    sys.stderr.write(f"samo: {rank}{message}\n")


def _leave_at_once(code: int) -> None:
    """End without closing connections: that would wait for the rank that was just given up."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _rank() -> str:
    return os.environ.get("RANK", "0")
