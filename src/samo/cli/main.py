"""The command ``samo``: parse, run, and report errors.

Nothing heavy is imported before the command is known, so that help appears at once.
"""

import importlib
import inspect
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, Literal, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from samo import __version__
from samo.cli.commands import (
    COMMANDS,
    USUAL,
    USUAL_FINETUNE,
    Command,
    Evaluate,
    Finetune,
    Launch,
    Train,
)
from samo.errors import ConfigError, DataError, PeerError, SamoError, nearest
from samo.train.config_io import read_toml
from samo.train.finetune_config import KINDS
from samo.train.launch_env import end_with_launcher
from samo.train.rules import check_ranges
from samo.utils.formatting import plain


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 1 failure, 2 wrong usage.

    `samo plan` returns 3 if nothing fits.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        sys.stdout.write(f"samo {__version__}\n")
        return 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the terminal may not know a character
    _log_to_stderr()
    # A rank that waits asks its store again every second, and torch would log each time.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded
    _limit_spinning()
    rank, num_ranks = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
    prefix = "samo: " if num_ranks == 1 else f"samo: rank {rank}: "
    try:
        end_with_launcher()
        try:
            command = parse(arguments or ["--help"])
        except SystemExit:  # help was printed
            sys.stdout.flush()  # a closed pipe shows here, not when Python exits
            raise
        name = "train" if isinstance(command, Finetune) else type(command).__name__.lower()
        module = importlib.import_module(f"samo.cli.{name}")
        code = int(module.run(command))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        if rank == "0":  # all ranks have the same one
            _complain(f"samo: {error}")
        return 2
    except DataError as error:
        is_shared = num_ranks > 1 and rank == "0"  # the others have it as a ConfigError
        _complain(f"{'samo: ' if is_shared else prefix}{error}")
        return 2 if is_shared else 1
    except SamoError as error:
        _complain(f"{prefix}{error}")
        if isinstance(error, PeerError) and num_ranks > 1:
            # A normal exit closes connections, and would wait for the rank that has failed.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        return 1
    except KeyboardInterrupt:
        _complain(f"{prefix}interrupted")
        return 130
    except BrokenPipeError:  # as in samo inspect | head, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        _complain(f"{prefix}{error.filename or 'the system'}: {error.strerror or error}")
        return 1


def _complain(text: str) -> None:
    sys.stderr.write(f"{plain(text)}\n")  # a name in a file may have control characters


def parse(arguments: Sequence[str]) -> Command:
    """Return the command that was typed."""
    name, launched = arguments[0], tuple[str, ...]()
    words = [word for word in arguments if word in ("train", "finetune")]
    if name == "launch" and words:  # flags after that word are not launch's own
        place = arguments.index(words[0])
        arguments, launched = arguments[: place + 1], tuple(arguments[place:])
        given = {word.partition("=")[0] for word in launched}
        for flag in {"-n", "--num-ranks", "--max-restarts", "--logs"} & given:
            raise ConfigError(
                f"{flag} goes before the word {words[0]}: samo launch {flag} ... {words[0]}"
            )
    kind: Any = Command
    prog, text = "samo", _ABOUT
    if name in COMMANDS:  # errors then point to the help of this command
        kind, prog, text, arguments = COMMANDS[name], f"samo {name}", "", arguments[1:]
    elif not name.startswith("-"):
        if name == "chat":
            raise ConfigError(
                f"no command 'chat'; use: samo generate {' '.join(arguments[1:])} --chat"
            )
        guess = nearest(name, COMMANDS)
        raise ConfigError(f"no command '{name}'{guess}; choose among {', '.join(COMMANDS)}")
    if (
        kind in (Finetune, Evaluate)
        and len(arguments) > 1
        and not any(w.startswith("-") for w in arguments[:2])
    ):
        raise ConfigError(
            f"'{arguments[1]}' follows the model; name data with --data: {prog} "
            f"{arguments[0]} --data {arguments[1]}"
        )
    if kind is Launch and not words and not {"-h", "--help"} & {*arguments}:
        raise ConfigError(
            "samo launch can start train and finetune only: samo launch -n 4 train notes.txt"
        )
    for flag in _with_several_values(kind):
        if sum(word == flag or word.startswith(f"{flag}=") for word in arguments) > 1:
            raise ConfigError(
                f"{flag} is given twice, and only the last would count; name everything after one "
                f"{flag}"
            )
    is_run = kind in (Train, Finetune)
    if is_run and "--help-all" in arguments:
        arguments = ["--help"]
    elif is_run and {"-h", "--help"} & {*arguments}:
        about = inspect.cleandoc(kind.__doc__)
        examples = _FINETUNE if kind is Finetune else ""
        text = f"{about}\n\n{examples}All settings: samo {name} --help-all"
        kind = _usual(kind)
    read = partial(
        tyro.cli,
        kind,
        prog=prog,
        description=text or None,
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        registry=_NUMBERS,
    )
    command: Command = read()
    if isinstance(command, Train | Finetune) and (command.config or command.resume):
        command = read(default=_run_defaults(kind, command))
    check_ranges(command)
    if isinstance(command, Launch):
        if before := command.command[:-1]:
            raise ConfigError(f"unexpected '{before[0]}' before {words[0]}")
        return replace(command, command=launched)
    return command


def _with_several_values(kind: Any) -> Iterator[str]:
    """Yield the flags of a command that take any number of values."""
    for entry in fields(kind) if is_dataclass(kind) else ():
        if is_dataclass(entry.type):
            yield from _with_several_values(entry.type)
        elif entry.default == () or entry.default_factory is dict:
            yield f"--{entry.name.replace('_', '-')}"


_ABOUT: Final = """Train pruned neural networks with a fraction of the memory.

  samo demo                                   see it work, in a minute
  samo train notes.txt                        train a GPT on your text
  samo train --resume runs/notes              after Ctrl-C or a crash
  samo prune my-llama --sparsity 0.7 --method wanda --calibration notes.txt
                                              prune a Hugging Face model
  samo finetune my-llama-pruned --data FILE   recover a pruned model
  samo export runs/notes                      a Hugging Face folder of it
  samo generate my-llama --chat               talk to a model
  samo evaluate my-llama --data FILE          its perplexity
  samo plan my-llama --gpu rtx4090            does it fit, and how fast
  samo COMMAND --help                         its settings
  samo --version"""

_FINETUNE: Final = """  samo finetune my-llama-pruned --data notes.jsonl
  samo finetune my-llama --sparsity 0.5 --data notes.jsonl

"""

_NUMBERS: Final = ConstructorRegistry()
"""How tyro reads numbers, with errors in the words of a user."""


@_NUMBERS.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Read a whole number, a number, or either or the word auto."""
    options = get_args(info.type) or [info.type]
    kinds = [getattr(option, "__origin__", option) for option in options]  # without a Range
    kind, is_auto = kinds[0], kinds[1:] == [Literal]
    if kind not in (int, float) or not (is_auto or len(kinds) == 1):
        return None

    def read(words: list[str]) -> Any:
        try:
            return words[0] if is_auto and words[0] == "auto" else kind(words[0])
        except ValueError:
            number = "a whole number" if kind is int else "a number"
            rule = f"{number} or auto" if is_auto else number
            raise ValueError(f"it takes {rule}, got {words[0]!r}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper() + "|auto" * is_auto,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int | float) or value == "auto",
        str_from_instance=lambda value: [str(value)],
    )


def _usual(kind: Any, shown: frozenset[str] | None = None) -> Any:
    """Return a dataclass of settings, with all but the usual ones hidden from help."""
    shown = shown or (USUAL_FINETUNE if kind is Finetune else USUAL)
    found = []
    for entry in fields(kind):
        if is_dataclass(entry.type):
            usual = _usual(entry.type, shown)
            found.append((entry.name, usual, field(default_factory=usual)))
        elif entry.name not in shown:
            found.append((entry.name, Annotated[None, tyro.conf.Suppress], field(default=None)))
    return make_dataclass(kind.__name__, found, bases=(kind,), frozen=True, kw_only=True)


def _run_defaults(kind: type[Train] | type[Finetune], given: Train | Finetune) -> Any:
    """Return the settings of --config or --resume, which flags override."""
    if given.resume is not None:
        for name in ("config", "out"):
            if getattr(given, name) is not None:
                raise ConfigError(f"leave out --{name}: --resume uses the settings of the run")
        from samo.train.resolve import again
        from samo.train.run_dir import RunDir

        recorded = RunDir.find(given.resume).config()
        if recorded.kind != kind.kind:
            raise ConfigError(
                f"'{given.resume}' is a run of samo {recorded.kind}; resume it with samo "
                f"{recorded.kind} --resume {given.resume}"
            )
        base: Any = again(recorded)
    else:
        assert given.config is not None
        base = read_toml(given.config, KINDS[kind.kind])
    names = [entry.name for entry in fields(kind) if hasattr(base, entry.name)]
    return kind(**{name: getattr(base, name) for name in names})


def _log_to_stderr() -> None:
    """Show the warnings of samo only."""
    logger = logging.getLogger("samo")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("samo: %(message)s"))
        logger.addHandler(handler)


def _limit_spinning() -> None:
    """Let OpenMP threads that wait sleep soon; must run before torch starts them.

    By default they spin for milliseconds, which slows everything on a busy machine: a step of the
    demo on 2 cores next to a busy process took 480 to 1,700 ms, and 125 with this (2026-11-15).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
