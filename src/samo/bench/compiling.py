"""``samo bench step --compile``: every contender's model is compiled in the same way.

none      not at all
blocks    each block by itself, with Inductor; equal blocks share their code
model     forward and loss as one graph, with Inductor
graphs    the same, replayed from CUDA graphs

Checkpointing stands around compiled blocks, which run once more in backward, and inside of a compiled
model. The optimizer is never compiled. There are no CUDA graphs of checkpointed blocks: torch 2.11 cannot
replay them, of any contender.
"""

from typing import Any

import torch

from samo.bench.settings import Compile
from samo.models.gpt import GPT

__all__ = []


def compile_(model: GPT, how: Compile) -> None:
    """Have a model compiled at its first steps; a part that cannot be is an error, not left as it is."""
    if how == "none":
        return
    options: dict[str, Any] = {"fullgraph": True}
    if has_graphs(how):
        options["mode"] = "reduce-overhead"
    for module in model.blocks if how == "blocks" else [model]:
        module.compile(**options)


def has_graphs(how: Compile) -> bool:
    """Return whether steps are replayed from CUDA graphs."""
    return how == "graphs"


def begin_step(how: Compile) -> None:
    """Say that nobody reads any more what the graphs of the last step gave: loss and gradients."""
    if has_graphs(how):
        torch.compiler.cudagraph_mark_step_begin()


def forget() -> None:
    """Forget all compiled code, its counts and its CUDA graphs, as if nothing had been compiled yet."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def counts(how: Compile) -> dict[str, int]:
    """Return how much was compiled since `forget`, and with CUDA graphs how much of it is run without.

    Example:
        >>> from samo.bench.compiling import counts, forget
        >>> forget()
        >>> counts("graphs"), counts("none")
        ({'compilations': 0, 'cudagraph_skips': 0}, {})
    """
    if how == "none":
        return {}
    found = torch._dynamo.utils.counters
    made = {"compilations": found["stats"]["unique_graphs"]}
    if has_graphs(how):
        made["cudagraph_skips"] = found["inductor"]["cudagraph_skips"]
    return made
