"""When the replicas of a stage exchange gradients: once for an optimizer step, in its last backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from samo.owners import owned_weights
from samo.partners import Team

__all__ = []


class Syncing:
    """Holds a stage's replicas back from exchanging gradients that others will be added to."""

    def __init__(self) -> None:
        self._teams: list[Team] = []
        self._is_last_batch = True

    def begin(self, module: nn.Module, *, is_last_batch: bool) -> None:
        """Learn of a batch, and of the replicas that the stage has by now."""
        replicas = (weight.replica for weight in owned_weights(module).values())
        self._teams = list({id(r.team): r.team for r in replicas if r is not None}.values())
        self._is_last_batch = is_last_batch

    @contextmanager
    def around(self, is_last_pass: bool) -> Iterator[None]:
        """Surround a pass; inside of `samo.no_sync` nothing is exchanged at all."""
        before = [team.is_syncing for team in self._teams]
        for team, was_syncing in zip(self._teams, before):
            team.is_syncing = was_syncing and self._is_last_batch and is_last_pass
        try:
            yield
        finally:
            for team, was_syncing in zip(self._teams, before):
                team.is_syncing = was_syncing
