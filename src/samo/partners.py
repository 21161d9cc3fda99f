"""Whom a weight and an optimizer work with: a loss scaler, and copies of the model on other ranks.

Nothing here knows how they do it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from samo.weights import Weight

__all__ = []


class Scaler(Protocol):
    """What a weight and an optimizer need of a loss scaler."""

    inverse: Tensor
    """One over the loss scale: a factor on every gradient as it is compressed."""

    def update(self, nonfinite: Tensor) -> None:
        """Adjust the scale after a step."""


class Team(Protocol):
    """What optimizers, pipelines and changes of masks need of the ranks that train a model."""

    is_syncing: bool
    """Whether gradients of a backward pass are exchanged, or only added up on their rank."""

    def before_step(self, weights: list["Weight"]) -> None:
        """Refuse a step on gradients that are not those of all ranks."""

    def after_step(self, weights: list["Weight"]) -> None:
        """Let every rank compute with the new values."""

    def any(self, flag: Tensor) -> Tensor:
        """Return whether a flag, a boolean scalar, is set on any rank whose gradients differ from ours."""

    def add_up(self, tensor: Tensor, what: str) -> Tensor:
        """Return the sum of a tensor over all ranks, which call it in the same order; it stays as it is."""


@dataclass
class Line:
    """The stages of a pipeline, of which this rank is one; what they agreed on after a batch.

    Attributes:
        nonfinite: Whether the gradients of any stage are not finite.
    """

    nonfinite: bool = False


class Replica(Protocol):
    """What a weight needs to know of its copies on other ranks, and tells them."""

    @property
    def team(self) -> Team:
        """The ranks that train the model together."""

    @property
    def home(self) -> Tensor | None:
        """Where its gradient lies: a part of a buffer that is reduced as a whole."""

    @property
    def part(self) -> "Weight | None":
        """This rank's part of the weight, where optimizer state is sharded: what an optimizer updates."""

    @property
    def whole(self) -> "Weight | None":
        """The weight that this one is a rank's part of; None for a whole one."""

    @property
    def owned(self) -> tuple[int, int] | None:
        """Where the part begins and ends among the kept entries; None where there are no parts."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the part of each rank begins among the kept entries, and where the last one ends."""

    def cut(self, values: Tensor) -> Tensor:
        """Return what belongs to this weight of a vector of all kept entries."""

    def show_gradient(self) -> Tensor:
        """Return the reduced gradient of all kept entries, 0 where there is none; every rank calls it."""

    def set_gradient(self, values: Tensor, own: Tensor | None) -> None:
        """Take other gradients of all kept entries, the same on all ranks, in place of the reduced ones.

        ``own`` is added to what an optimizer updates here: the weight, or this rank's part of it.
        """

    def watch(self, take: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Return the hook of one use in a forward pass, which calls ``take``."""

    def expect(self) -> None:
        """Learn that a gradient comes, before it is written."""

    def arrived(self, *, is_last: bool) -> None:
        """Learn that a gradient was written; ``is_last`` if autograd summed it over all uses."""

    def adopted(self) -> None:
        """Learn that somebody else wrote to the parameter."""

    def clear(self) -> None:
        """Forget gradients that were not reduced yet."""
