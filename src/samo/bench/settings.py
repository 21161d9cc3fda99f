"""The settings of ``samo bench``, one dataclass for each subcommand: imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from tyro.conf import arg

from samo.models.shapes import ShapeName
from samo.train.config import Auto, Count, Names, OptionalPath, Range, Share

Compile = Literal["none", "blocks", "model", "graphs"]
Power = Annotated[int, Range(10, 35, "a power of 2")]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What every measurement takes."""

    out: OptionalPath = None
    """Folder for the results; by default benchmarks/results/NAME-DEVICE-DATE."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure; auto: on a GPU if there is one."""
    quick: bool = False
    """Tiny sizes and two repeats, only to check that it runs; the times mean nothing."""
    repeats: Count = 50
    """How often each operation is timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelsConfig(BenchConfig):
    """Time compress, expand and the update beside the bytes that they must move."""

    sizes: Annotated[tuple[Power, ...], arg(metavar="POWER ...", help_behavior_hint="")] = ()
    """Weights, as powers of 2; by default 26 to 30 on a GPU, 18 to 22 on a CPU. 32 takes 120 GB."""
    densities: Annotated[tuple[Share, ...], arg(metavar="FRACTION ...")] = (0.1, 0.2)
    """Fractions of the weights that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig(BenchConfig):
    """Time training steps of a pruned GPT: dense, masked dense, and samo in all its modes."""

    repeats: Count = 12
    """Timed steps of each contender, after some warm-up steps."""
    shape: ShapeName | Auto = "auto"
    """Shape of the GPT; auto: gpt3-2.7b on a GPU of 100 GB or more, a smaller one elsewhere."""
    batch_size: Count = 8
    """Sequences for each step."""
    context: Count = 1024
    """Length of a sequence, in tokens."""
    sparsity: Share = 0.9
    """Fraction of the weights that is pruned, in every matrix that is pruned by default."""
    checkpointed: bool = True
    """Recompute the activations of blocks in backward instead of storing them."""
    only: Names = ()
    """Contenders to measure, separated by commas or spaces; by default all."""
    compile: Compile = "none"
    """Compile each block of every model, or the whole model; graphs: with CUDA graphs too."""
    rounds: Count | Auto = "auto"
    """Rounds, which share the repeats. Contenders are built again in each, or take turns step by
    step if compiled. auto: 3, or 1 if compiled."""


QUESTIONS: Final[dict[type[BenchConfig], str]] = {KernelsConfig: "kernels", StepConfig: "step"}
"""The name of each subcommand, and of its module, with ``measure`` and ``tabulate``."""
