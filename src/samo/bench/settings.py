"""The settings of ``samo bench``, one dataclass for each question: imports no torch."""

import shlex
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from tyro.conf import arg

from samo.errors import ConfigError, nearest
from samo.models.shapes import ShapeName
from samo.train.config import Auto, OptionalPath

__all__ = ["BenchConfig", "KernelsConfig", "StepConfig"]

CONTENDERS: Final = (
    "dense",
    "masked",
    "autocast",
    "samo",
    "samo-torch",
    "lean",
    "streamed",
    "streamed-lean",
    "flashoptim",
    "flashoptim-release",
    "torchao",
    "bitsandbytes",
)
"""Ways to train that ``samo bench step`` compares; ``contenders.py`` says what each is."""

_PEERS: Final = CONTENDERS.index("flashoptim")
"""Where budgets stand: behind samo's own contenders."""

Compile = Literal["none", "blocks", "model", "graphs"]
"""What of a model is compiled; ``compiling.py`` says more."""

_SIZES: Final = (10, 34)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What every measurement takes."""

    out: OptionalPath = None
    """Folder for the result; benchmarks/results/NAME-DEVICE-DATE if nothing is said."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure; auto: on a GPU if there is one."""
    quick: bool = False
    """Tiny sizes and two repeats, only to see that it runs; the times mean nothing."""
    repeats: int = 50
    """How often each contender is timed, in turns with the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelsConfig(BenchConfig):
    """Time compress, expand and the update beside the bytes that they must move."""

    sizes: Annotated[tuple[int, ...], arg(metavar="POWER ...")] = ()
    """Weights, as powers of 2; if nothing is said 26 to 30 on a GPU and 18 to 22 on a CPU."""
    densities: Annotated[tuple[float, ...], arg(metavar="FRACTION ...")] = (0.1, 0.2)
    """Fractions of the weights that are kept."""
    large: bool = False
    """Measure 2^32 weights as well, which takes 120 GB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig(BenchConfig):
    """Time training steps of a pruned GPT, with samo and with what people would use instead."""

    repeats: int = 12
    """Steps of each contender that are timed; each has some more to warm up."""
    shape: ShapeName | Auto = "auto"
    """Shape of the GPT by name; auto: gpt3-2.7b on a GPU of 100 GB or more, a smaller one elsewhere."""
    batch_size: int = 8
    """Sequences for each step."""
    context: int = 1024
    """Length of a sequence, in tokens."""
    vocab_size: int = 50_304
    """Tokens the model knows."""
    sparsity: float = 0.9
    """Fraction of the weights that is pruned, in every matrix that is pruned by default."""
    checkpointed: bool = True
    """Compute the activations of blocks again in backward instead of storing them."""
    only: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Contenders to measure, with commas or spaces between; all if nothing is said."""
    budgets: Annotated[tuple[float, ...], arg(metavar="FRACTION ...")] = ()
    """Measure samo with these fractions of the dense weights resident and the rest streamed as well; each
    with exact and with lean state."""
    compile: Compile = "none"
    """Compile each block of every contender's model, or the whole; with graphs: replay CUDA graphs."""
    rounds: int | Auto = "auto"
    """How often contenders are built anew, to share the repeats and to be compared within each round;
    auto: 1, or 3 where they do not fit into memory together and are not compiled."""


class Question(NamedTuple):
    """A subcommand: what it is called, and the module with its ``measure``."""

    name: str
    module: str


QUESTIONS: Final[dict[type[BenchConfig], Question]] = {
    KernelsConfig: Question("kernels", "samo.bench.kernels"),
    StepConfig: Question("step", "samo.bench.step"),
}


def check(config: BenchConfig) -> None:
    """Refuse settings that nothing can be measured with.

    Example:
        >>> from samo.bench.settings import KernelsConfig, check
        >>> check(KernelsConfig(sizes=(20, 22)))

    Raises:
        ConfigError: A setting is out of range, or names no contender.
    """
    _require(config.repeats >= 1, f"repeats must be 1 or more, got {config.repeats}")
    if isinstance(config, KernelsConfig):
        low, high = _SIZES
        for size in config.sizes:
            _require(
                low <= size <= high,
                f"sizes are powers of 2 from {low} to {high}, got {size}; 30 stands for 2^30 weights",
            )
        for density in config.densities:
            _require(
                0 < density < 1,
                f"densities must lie between 0 and 1, got {density}; 0.1 keeps 10 %",
            )
        _require(bool(config.densities), "no densities to measure; leave them out for 0.1 and 0.2")
    if isinstance(config, StepConfig):
        for name in ("batch_size", "context", "vocab_size", "rounds"):
            value = getattr(config, name)
            _require(value == "auto" or value >= 1, f"{name} must be 1 or more, got {value}")
        contenders(config)
        _require(
            0 < config.sparsity < 1,
            f"sparsity must lie between 0 and 1, got {config.sparsity}; 0.9 prunes 90 %",
        )
        for share in config.budgets:
            _require(
                0 < share < 1,
                f"budgets must lie between 0 and 1, got {share}; 0.5 keeps half of the dense weights "
                "resident, 'streamed' none and 'samo' all",
            )


def contenders(config: StepConfig) -> tuple[str, ...]:
    """Return the names that ``--only`` and ``--budgets`` choose, in the order in which they are shown.

    Example:
        >>> from samo.bench.settings import StepConfig, contenders
        >>> contenders(StepConfig(only=("samo,dense",), budgets=(0.5,)))
        ('dense', 'samo', 'budget-50%', 'budget-50%-lean')

    Raises:
        ConfigError: A name is unknown.
    """
    wanted = [name for entry in config.only for name in entry.split(",") if name]
    for name in wanted:
        _require(
            name in CONTENDERS,
            f"'{name}' is no contender{nearest(name, CONTENDERS)}; there are {', '.join(CONTENDERS)}",
        )
    budgets = [
        f"budget-{100 * share:g}%{lean}" for lean in ("", "-lean") for share in config.budgets
    ]
    order = [*CONTENDERS[:_PEERS], *budgets, *CONTENDERS[_PEERS:]]
    return tuple(name for name in order if not wanted or name in wanted or name in budgets)


def command_line(config: BenchConfig) -> str:
    """Return what to type for these settings, without what is as it is by default.

    Example:
        >>> from samo.bench.settings import StepConfig, command_line
        >>> command_line(StepConfig(shape="gpt3-13b", only=("samo",), quick=True))
        'samo bench step --quick --shape gpt3-13b --only samo'
    """
    words = ["samo", "bench", QUESTIONS[type(config)].name]
    for entry in fields(config):
        value = getattr(config, entry.name)
        if entry.default is not MISSING and value == entry.default:
            continue
        name = entry.name.replace("_", "-")
        words.append(f"--no-{name}" if value is False else f"--{name}")
        if isinstance(value, tuple):
            words += map(str, value)
        elif not isinstance(value, bool):
            words.append(value.as_posix() if isinstance(value, Path) else str(value))
    return shlex.join(words)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
