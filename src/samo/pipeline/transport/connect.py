"""Connect the ranks of a pipeline: sockets between neighbours, and groups of any ranks.

Ranks meet through the store of torch.distributed, under names that count the pipelines of the same
ranks. torch's own names count all groups a rank has ever joined, so ranks of which some have joined
another group would never meet.
"""

import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from samo.distributed.store import in_time, next_key, ranks_store
from samo.errors import PeerError

_HELLO: Final = struct.Struct("<16sI")
_STORE_S: Final = 2.0
"""Seconds for the store to answer once the pipeline runs."""


class Meeting:
    """The ranks that build a pipeline together; ``place`` is this rank's among them.

    With several stages on a rank, the places are a ring. ``everyone`` are the ranks of all
    replicas, which share no link, and look into the store for how one of them failed.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        place: int,
        timeout_s: float,
        *,
        is_ring: bool = False,
        everyone: Sequence[int] = (),
    ) -> None:
        self.ranks: Final = tuple(ranks)
        self.place: Final = place
        self.timeout_s: Final = timeout_s
        self.is_ring: Final = is_ring
        store = ranks_store()
        self._host, self._interface = _host_of(store)
        self.store: Final = dist.PrefixStore(next_key("samo/pipeline", ranks), store)  # type: ignore[attr-defined]
        self._failures: Final = dist.PrefixStore(next_key("samo/failures", everyone), store)  # type: ignore[attr-defined]
        self._is_store_alive = True

    def record_failure(self, rank: int, what: str) -> None:
        """Record which rank failed, and how; the first writer wins."""
        text = json.dumps([rank, what])
        self._ask(lambda: self._failures.compare_set("first", "", text))

    def failure(self) -> tuple[int, str] | None:
        """Return the rank that failed, and how, if some rank has recorded it."""
        found = self._ask(
            lambda: self._failures.get("first") if self._failures.check(["first"]) else b""
        )
        if not found:
            return None
        rank, what = json.loads(found)
        return int(rank), str(what)

    def _ask(self, do: Callable[[], bytes]) -> bytes | None:
        """Ask the store, unless it has not answered before."""
        found = in_time(do, _STORE_S) if self._is_store_alive else None
        self._is_store_alive = found is not None
        return found

    def links(self) -> dict[int, socket.socket]:
        """Return a connection to each neighbour; the one with the lower place listens."""
        neighbours = neighbours_of(self.place, len(self.ranks), self.is_ring)
        above = {place for place in neighbours if place > self.place}
        deadline = time.monotonic() + self.timeout_s
        links: dict[int, socket.socket] = {}
        with _listen(self._interface) as server:
            token = secrets.token_bytes(16)  # so that nothing else connects by mistake
            if above:
                port = server.getsockname()[1]
                address = {"host": self._host, "port": port, "token": token.hex()}
                self.store.set(f"{self.place}", json.dumps(address))
            for place in neighbours:
                if place < self.place:
                    links[place] = self._connect(place, deadline)
            while missing := above - links.keys():
                server.settimeout(max(deadline - time.monotonic(), 1e-3))
                try:
                    link, _ = server.accept()
                    link.settimeout(5.0)
                    found, place = _HELLO.unpack(_receive(link, _HELLO.size))
                except TimeoutError:
                    if time.monotonic() < deadline:
                        continue
                    raise self._missed(min(missing)) from None
                except ConnectionError:
                    continue
                if secrets.compare_digest(found, token) and place in missing:
                    links[place] = link
                else:
                    link.close()
        for link in links.values():
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return links

    def group(self, name: str, places: Sequence[int], backend: str) -> Any:
        """Return a backend of torch that joins some places, which all call this."""
        store = dist.PrefixStore(name, self.store)  # type: ignore[attr-defined]
        kind: Any = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        # The runner gives up earlier, and names the neighbour.
        limit = timedelta(seconds=2 * self.timeout_s + 5)
        return kind(store, places.index(self.place), len(places), limit)

    def _connect(self, place: int, deadline: float) -> socket.socket:
        left = timedelta(seconds=max(deadline - time.monotonic(), 1e-3))
        try:
            self.store.wait([f"{place}"], left)
            found = json.loads(self.store.get(f"{place}"))
        except dist.DistError as error:
            raise self._missed(place) from error
        address = found["host"], found["port"]
        try:
            link = socket.create_connection(address, max(deadline - time.monotonic(), 1e-3))
            link.sendall(_HELLO.pack(bytes.fromhex(found["token"]), self.place))
        except OSError as error:
            rank = self.ranks[place]
            raise PeerError(
                f"rank {rank} (stage {place} of {len(self.ranks)}) cannot be reached at "
                f"{address[0]}, port {address[1]} ({error}). If it is running, its address is "
                "wrong, the one from which it reaches the ranks' store: set MASTER_ADDR, on all "
                "machines, to a name or address of the store's machine that all of them reach",
                rank=rank,
                stage=place,
            ) from error
        return link

    def _missed(self, place: int) -> PeerError:
        rank = self.ranks[place]
        return PeerError(
            f"rank {rank} (stage {place} of {len(self.ranks)}) did not connect within "
            f"{self.timeout_s:g} s; all ranks must build the same pipelines in the same order, on "
            "machines that reach each other",
            rank=rank,
            stage=place,
            is_timeout=True,
        )


def neighbours_of(place: int, num_places: int, is_ring: bool) -> list[int]:
    """Return the places that a rank exchanges packets with."""
    around = {place - 1, place + 1}
    if is_ring:
        around = {other % num_places for other in around} - {place}
    return sorted(around & set(range(num_places)))


def _listen(interface: str) -> socket.socket:
    if not interface and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    return socket.create_server((interface, 0), family=family)


def _receive(link: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = link.recv(size - len(found))
        if not more:
            raise ConnectionError("closed")
        found += more
    return found


def _host_of(store: Any) -> tuple[str, str]:
    """Return an address of this machine that all ranks reach, and the interface to listen on.

    It is the interface from which this machine reaches the store. The store's own machine would
    find its loopback address, and takes the name under which the others have reached it.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host: str = getattr(store, "host", "") or socket.gethostname()
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1", "127.0.0.1"
    if not _is_loopback(own):
        return own, own
    # Any interface, if others know the machine by a name that it takes for its loopback address.
    return host, own if host == "localhost" or _is_loopback(host) else ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
