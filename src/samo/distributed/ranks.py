"""How ranks do something as one: what fails on any rank is raised on all.

    every rank       acts, and posts its result or its error
    the first one    waits for all, decides, and posts the outcome
    every rank       returns the outcome, or raises

Small JSON goes between ranks, through the store of the process group. A store needs no backend: a
rank that does not answer is known by the key it has not set, and no connection breaks when the
first rank gives up on it.
"""

import json
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from samo import errors
from samo.distributed.store import next_key, own_connection, ranks_store
from samo.distributed.watchdog import listed
from samo.errors import CheckpointError, ConfigError, DataError, PeerError, first_words

LookAfter = Callable[[tuple[int, ...]], None]

_LOOK_S: Final = 2.0


class Ranks:
    """The global ranks that all make a call, of which the first decides; by default one process.

    After ``timeout_s`` without progress on any rank, those that are missing are given up. While a
    rank waits, it calls ``look_after`` every few seconds with those ranks, which raises if one of
    them has failed. The failure of another rank is raised as ``error``.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (),
        caller: str = "",
        timeout_s: float = 0.0,
        look_after: LookAfter = lambda ranks: None,
        error: type[CheckpointError | PeerError] = CheckpointError,
    ) -> None:
        self.ranks: Final = tuple(ranks) or (0,)
        self._look_after: Final = look_after
        self._error: Final = error
        self.rank: Final = dist.get_rank() if ranks else 0
        self.place: Final = self.ranks.index(self.rank)
        self.is_alone: Final = len(self.ranks) == 1
        if self.is_alone:
            return
        # The others wait longer: the first rank finds out which one is silent, and tells them.
        self._grace_s: Final = min(timeout_s, 5.0)
        self._limit_s: Final = timeout_s + (self._grace_s if self.place else 0.0)
        self._step = 0
        self._noted = 0.0
        self.store: Final = own_connection(ranks_store())
        self.key: Final = next_key(caller, self.ranks)
        self._store: Final = dist.PrefixStore(self.key, self.store)  # type: ignore[attr-defined]

    def run_all(
        self,
        what: str,
        act: Callable[[], Any],
        decide: Callable[[list[Any]], Any] = lambda results: None,
    ) -> Any:
        """Call ``act`` on all ranks, then ``decide`` on the first one; return what that returns.

        ``decide`` gets the results of all ranks, in their order. Both return JSON. An error of this
        rank is raised as it is, and PeerError if another one does not answer. ``what`` says in
        errors what ranks wait for.
        """
        if self.is_alone:
            return decide([act()])
        self._step += 1
        error, answer = self._attempt(act)
        try:
            if self.place == 0:
                decided, outcome = self._decide(what, answer, decide)
                error = error or decided
                self._post(outcome)
            else:
                self._store.set(self._key(f"answer {self.rank}"), json.dumps(answer))
                self._wait(what, {self._key("outcome"): self.ranks[0]})
                outcome = json.loads(self._store.get(self._key("outcome")))
                if self._store.add(self._key("readers"), 1) == outcome["readers"]:
                    self._store.set(self._key("read"), "")
        except dist.DistNetworkError as lost:
            raise PeerError(
                f"rank {self.rank} lost the store of its process group, which rank 0 or the "
                f"launcher holds: {first_words(lost)}. Look at their logs, and restart the ranks",
                (0,),
            ) from lost
        if error is not None:
            raise error
        if "failure" in outcome:
            raise self._remote_error(**outcome["failure"])
        return outcome["value"]

    def note_progress(self) -> None:
        """Tell ranks that wait that this one is at work."""
        if not self.is_alone and time.monotonic() - self._noted > 0.1 * self._limit_s:
            self._noted = time.monotonic()
            self._store.add("progress", 1)

    def post(self, key: str, note: str) -> None:
        """Leave a note for all ranks; a later one under the same key replaces it."""
        self._store.set(f"note {key}", note)

    def read(self, key: str) -> str:
        """Return the note that was left under a key, "" if there is none."""
        name = f"note {key}"
        return self._store.get(name).decode() if self._store.check([name]) else ""

    def _key(self, name: str) -> str:
        return f"{self._step}/{name}"

    def _attempt(self, call: Callable[[], Any]) -> tuple[BaseException | None, dict[str, Any]]:
        """Return the error of a call, and its result or its error as JSON."""
        try:
            return None, {"value": call()}
        except BaseException as error:
            return error, {
                "failure": {
                    "rank": self.rank,
                    "kind": type(error).__name__,
                    "message": str(error) or traceback.format_exception_only(error)[-1].strip(),
                    "lost": list(error.ranks) if isinstance(error, PeerError) else [],
                }
            }

    def _decide(
        self, what: str, own: dict[str, Any], decide: Callable[[list[Any]], Any]
    ) -> tuple[BaseException | None, dict[str, Any]]:
        keys = {self._key(f"answer {rank}"): rank for rank in self.ranks[1:]}
        error, outcome = self._attempt(lambda: self._wait(what, keys))
        if error is not None:
            return error, outcome
        for name in ("outcome", "readers", "read"):  # of the call before, which all have read
            self._store.delete_key(f"{self._step - 1}/{name}")
        answers = [own]
        for key in keys:
            answers.append(json.loads(self._store.get(key)))
            self._store.delete_key(key)
        for answer in answers:
            if "failure" in answer:
                return None, answer
        return self._attempt(lambda: decide([answer["value"] for answer in answers]))

    def _post(self, outcome: dict[str, Any]) -> None:
        """Post the outcome, and wait for its readers: the store may end with this process."""
        lost = outcome.get("failure", {}).get("lost", ())
        outcome["readers"] = sum(rank not in lost for rank in self.ranks[1:])
        self._store.set(self._key("outcome"), json.dumps(outcome))
        if outcome["readers"]:
            with suppress(dist.DistStoreError):
                self._store.wait([self._key("read")], timedelta(seconds=self._grace_s))

    def _wait(self, what: str, missing: dict[str, int]) -> None:
        """Wait until ranks have set their keys, for as long as any rank makes progress."""
        looked = begun = time.monotonic()
        progress = 0
        while missing:
            try:
                self._store.wait(list(missing), timedelta(seconds=min(1.0, self._limit_s)))
                return
            except dist.DistNetworkError:
                raise
            except dist.DistStoreError:  # that second is over
                missing = {k: rank for k, rank in missing.items() if not self._store.check([k])}
            if time.monotonic() - looked > _LOOK_S:
                self._look_after(tuple(missing.values()))
                looked = time.monotonic()
            if (now := self._store.add("progress", 0)) != progress:
                begun, progress = time.monotonic(), now
            if missing and time.monotonic() - begun > self._limit_s:
                lost = tuple(missing.values())
                raise PeerError(
                    f"{listed(lost)} did not answer for {self._limit_s:g} s while rank {self.rank} "
                    f"waited for {what}. All ranks must make this call. Look at the log of that "
                    "rank, and start the ranks again",
                    lost,
                )

    def _remote_error(self, rank: int, kind: str, message: str, lost: list[int]) -> Exception:
        if kind == PeerError.__name__:
            return PeerError(message, tuple(lost))
        if rank == 0 and kind in (ConfigError.__name__, DataError.__name__):
            return ConfigError(message)  # a mistake of the command, which all ranks were given
        kind = "" if kind.endswith("Error") and kind in vars(errors) else f"{kind}: "
        text = f"rank {rank} failed: {kind}{message}"
        if self._error is PeerError:
            return PeerError(text, (rank,), is_diagnosed=True)
        return self._error(text)
