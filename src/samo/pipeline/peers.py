"""The neighbours of a rank: hear from them, and name a rank that fails.

A rank that has waited for half of the timeout probes the silent neighbour. A neighbour that is
itself waiting answers at once. One that is dead, stopped or stuck in its own computation does not,
and is reported when the timeout expires. The report is sent on as an "abort", so every rank raises
a `PeerError` that names the same rank.
"""

import datetime
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import torch
import torch.distributed as dist

from samo.errors import PeerError, SamoError, first_words
from samo.pipeline.transport.connect import Meeting
from samo.pipeline.transport.tcp import Transport
from samo.pipeline.transport.wire import Packet

_ABORT_S: Final = 2.0
"""Seconds to send an "abort", or to wait for one after a collective has failed."""
_PATIENCE: Final = 3
"""Timeouts after which a neighbour that answers probes, and sends nothing else, is given up."""


class Peers:
    """The ranks that one rank hears from, and tells of failures.

    In ``meeting``, failures are recorded for ranks without a link to this one.
    """

    def __init__(
        self, transport: Transport, timeout_s: float, meeting: Meeting | None = None
    ) -> None:
        self.transport: Final = transport
        self.timeout_s: Final = timeout_s
        self._meeting: Final = meeting
        self._heard: Final[dict[int, float]] = {}  # when, from each neighbour
        self._failure: str | None = None

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Packet]]:
        """Return data that has come; answer probes, and raise a failure that is reported."""
        self.transport.poll(timeout_s)
        inbox, found = self.transport.inbox, []
        while inbox:
            place, packet = inbox.popleft()
            self._heard[place] = time.monotonic()
            if packet.kind == "abort":
                self.fail(packet.stage, packet.reason, skip=place)
            elif packet.kind == "probe":
                self.transport.send(place, Packet("alive"))
            elif packet.kind != "alive":
                found.append((place, packet))
        return found

    def receive(self, due: set[int]) -> list[tuple[int, Packet]]:
        """Wait for data, which is due from some neighbours; watch the clock meanwhile."""
        begin = now = time.monotonic()
        probed = dict.fromkeys(due, begin)
        while True:
            # One that has ended its batch may exit: its link is missed if more is due from it.
            self._check_links(due)
            for place in due if now - begin >= self.timeout_s / 2 else ():
                silence = now - max(begin, self._heard.get(place, 0.0))
                if silence >= self.timeout_s:
                    self.fail(place, f"has been silent for {silence:.1f} s", is_timeout=True)
                if now - begin > _PATIENCE * self.timeout_s:
                    what = f"is alive, but has sent no data for {now - begin:.1f} s"
                    self.fail(place, what, is_timeout=True)
                if min(silence, now - probed[place]) >= self.timeout_s / 2:
                    probed[place] = now
                    self.transport.send(place, Packet("probe"))
            if found := self.poll(max(0.01, self.timeout_s / 8)):
                return found
            now = time.monotonic()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report to the other ranks what fails in this context; at its end, all is sent."""
        if self._failure is not None:
            raise PeerError(f"the pipeline failed earlier ({self._failure}); restart all ranks")
        transport = self.transport
        try:
            yield
            late = transport.flush(self.timeout_s, transport.links)
            if late is not None:
                self._hear_reports()
                what = f"did not take what was sent to it for {self.timeout_s:g} s"
                self.fail(late, what, is_timeout=True)
        except PeerError as error:
            self._failure = self._failure or str(error)
            raise
        except BaseException as error:
            if transport.links:  # a pipeline of one rank can run the next batch
                self._failure = f"{type(error).__name__}: {error}"
                if self._meeting is not None:
                    own = transport.ranks[transport.place]
                    self._meeting.record_failure(own, self._failure)
                self._send_abort(transport.place, self._failure, transport.links)
            raise

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Do something in this context that all ranks do together outside of a batch."""
        with self.reporting():
            try:
                yield
            except (SamoError, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                deadline = time.monotonic() + min(_ABORT_S, self.timeout_s)
                while self.transport.links and time.monotonic() < deadline:
                    self._hear_reports(0.05)
                    self._raise_recorded()
                self._check_links(self.transport.links)
                raise PeerError(
                    f"another rank did not join a collective ({first_words(error)}); restart all "
                    "ranks from the last checkpoint"
                ) from error

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective on the host, and for reports of neighbours that fail meanwhile."""
        begin = looked = time.monotonic()
        while True:
            try:
                work.wait(datetime.timedelta(seconds=0.1))
                return
            except RuntimeError:
                if work.is_completed():  # since, or with an error
                    work.wait()
                    return
                waited = time.monotonic() - begin
                if waited > self.timeout_s:
                    raise
            self._hear_reports()  # nothing but those 0.1 s were over
            if time.monotonic() - looked > 1.0:
                self._raise_recorded()
                looked = time.monotonic()
            if waited > _ABORT_S:
                self._check_links(self.transport.links)

    def fail(
        self, origin: int, what: str, *, skip: int | None = None, is_timeout: bool = False
    ) -> NoReturn:
        """Tell the neighbours, other than one that knows or is silent, who failed; and raise."""
        transport = self.transport
        skip = origin if is_timeout else skip
        self._send_abort(origin, what, [place for place in transport.links if place != skip])
        rank = dict(enumerate(transport.ranks)).get(origin)  # a peer may send any number
        if self._meeting is not None and rank is not None:
            self._meeting.record_failure(rank, what)
        raise PeerError(
            f"rank {rank} (stage {origin} of {len(transport.ranks)}) {what}. Stage "
            f"{transport.place} lost its batch: restart all ranks from the last checkpoint",
            rank=rank,
            stage=origin,
            is_timeout=is_timeout,
        )

    def _check_links(self, places: Iterable[int]) -> None:
        for place in places:
            if error := self.transport.broken.get(place):
                is_invalid = isinstance(error, ValueError)
                self.fail(place, str(error) if is_invalid else f"is gone ({error})")

    def _hear_reports(self, timeout_s: float = 0.0) -> None:
        """Raise the failure that a neighbour has reported, if any; keep data for the next batch."""
        self.transport.inbox.extend(self.poll(timeout_s))

    def _raise_recorded(self) -> None:
        """Raise the failure that a rank without a link to this one has recorded, if any."""
        failure = None if self._meeting is None else self._meeting.failure()
        if failure is not None:
            rank, what = failure
            text = f"rank {rank} {what}. Restart all ranks from the last checkpoint"
            raise PeerError(text, rank=rank)

    def _send_abort(self, origin: int, what: str, places: Iterable[int]) -> None:
        for place in places:
            self.transport.send(place, Packet("abort", stage=origin, reason=what))
        self.transport.flush(min(_ABORT_S, self.timeout_s), places)
