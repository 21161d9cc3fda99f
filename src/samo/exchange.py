"""One weight from mask to mask with everything stored beside it, so that it can be undone.

Weights are taken one after the other, and a weight in pieces of 2**20 entries. What is dropped is held
until the last weight is done: if one fails (memory runs out), the same exchange with the masks the other
way round puts back those that came before it. The one that fails still has its old vectors.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from samo.kernels.ages import ages_at
from samo.mask import Mask
from samo.optim import AdamW
from samo.transfer import move
from samo.weights import Weight

__all__ = []

Vectors = dict[str, Tensor]
"""What belongs to the kept entries of a weight, by name."""


class Plan(NamedTuple):
    """What happens to one weight."""

    weight: Weight
    mask: Mask
    added: Vectors
    """Of the entries kept anew what is not 0."""
    states: list[tuple[Optimizer, dict[str, Any]]]
    """The optimizers that keep something for the weight, and what."""


class _Side(NamedTuple):
    """A weight before or after its masks change."""

    mask: Mask | None
    values: Tensor
    rest: Tensor | None
    grad: Tensor | None
    states: list[dict[str, Any]]
    """What each optimizer keeps."""


@dataclass(slots=True)
class Change:
    """The change of one weight: done as a whole, or undone."""

    plan: Plan
    old: _Side
    new: _Side
    dropped: Vectors
    is_done: bool = False

    def do(self) -> None:
        """Change the weight, and hold no more of its old side than what is dropped."""
        self.plan.weight.write(self.new.values, self.new.mask)
        self._take(self.new)
        self.is_done = True
        empty = self.old.values[:0]
        self.old = self.new = _Side(self.old.mask, empty, None, None, [])

    def undo(self, error: BaseException) -> None:
        """Put back the old side, whether the weight was changed wholly or in part."""
        weight, old = self.plan.weight, self.old
        try:
            if self.is_done:
                old = prepare(self.plan, old.mask, self.dropped).new
            self._take(old)
            weight.write(old.values, old.mask)
        except (MemoryError, RuntimeError):  # torch has both
            error.add_note(
                f"the values of '{weight.name}' could not be put back for want of memory; load a "
                "checkpoint before you go on"
            )

    def _take(self, side: _Side) -> None:
        self.plan.weight.take_mask(side.mask, side.rest, side.grad)
        for (_, state), kept in zip(self.plan.states, side.states):
            state.clear()
            state.update(kept)


def prepare(plan: Plan, mask: Mask | None, added: Vectors) -> Change:
    """Work out a weight with another mask, and what it drops; ``None`` only to undo."""
    weight = plan.weight
    rest, grad = weight.rest, weight.leaf.grad
    vectors: Vectors = {"values": weight.values()}
    if rest is not None:
        vectors["rest"] = rest
    if grad is not None:
        vectors["grad"] = grad
    for index, (opt, state) in enumerate(plan.states):
        for key, value in _vectors_of(opt, state, weight).items():
            vectors[f"{index}/{key}"] = value
    whole = _or_whole(weight, mask)
    moved, dropped = move(vectors, _or_whole(weight, weight.mask), whole, added)

    states = []
    for index, (_, state) in enumerate(plan.states):
        new = dict(state)
        for key in [*state, "age"]:
            if f"{index}/{key}" in moved:
                new[key] = moved[f"{index}/{key}"]
            elif rest is not None and state.get(key) is rest:  # AdamW lists it
                new[key] = moved["rest"]
        if mask is None:
            new.pop("age", None)  # which only pruned weights have
        states.append(new)
    old_side = _Side(
        weight.mask, vectors["values"], rest, grad, [dict(state) for _, state in plan.states]
    )
    new_side = _Side(mask, moved["values"], moved.get("rest"), moved.get("grad"), states)
    return Change(plan, old_side, new_side, dropped)


def _or_whole(weight: Weight, mask: Mask | None) -> Mask:
    return Mask.whole(weight.shape, weight.device) if mask is None else mask


def _vectors_of(opt: Optimizer, state: dict[str, Any], weight: Weight) -> Vectors:
    """Return what an optimizer keeps for each kept entry."""
    if isinstance(
        opt, AdamW
    ):  # scales of lean state belong to places in the dense tensor, and stay
        vectors: Vectors = {
            key: state[key] for key in ("exp_avg", "exp_avg_sq", "age") if key in state
        }
        if opt.entry_steps and weight.mask is None:
            vectors["age"] = ages_at(state["step"], weight.kept)
        return vectors
    return {
        key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() == 1
    }
