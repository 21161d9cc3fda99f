"""Messages between one rank of a mesh, the first, and each of the others: bytes and tensors, nothing pickled.

A message is a length and that many bytes. Both ends of a link know whose turn it is, so an operation
that fails names the rank at its other end. No group is made for them: torch names new groups by how many
a rank has made already, so that ranks which have made different numbers would never meet.
"""

import datetime
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from samo.errors import PeerError, first_words

__all__ = []

_TAG: Final = 0x5A30
"""Sets these messages apart from others between the same ranks, where the backend has tags."""

_MAX_JSON_BYTES: Final = 2**30


class Links:
    """The links of this rank.

    Args:
        ranks: Global ranks, the same on all of them; the first leads.
        timeout_s: Seconds after which the leader gives up a rank. The others wait twice as long and a
            little more: the leader finds out first, and tells them.
    """

    def __init__(self, ranks: Sequence[int], *, timeout_s: float) -> None:
        self.ranks: Final = tuple(ranks)
        self.rank: Final = dist.get_rank()
        self.is_leader: Final = self.rank == self.ranks[0]
        self._patience_s: Final = 2 * timeout_s + 5
        self._limit_s: Final = timeout_s if self.is_leader else self._patience_s
        world = dist.group.WORLD
        assert world is not None, "whoever has a mesh has joined the others"
        kinds = {device.type for device in world._device_types}
        self._device: Final = (
            torch.device("cpu") if "cpu" in kinds else torch.device("cuda", _cuda_index())
        )

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but the leader."""
        return self.ranks[1:]

    def send_json(self, rank: int, content: Mapping[str, Any]) -> None:
        """Send something that JSON can say.

        Raises:
            PeerError: The rank is gone, or does not listen.
        """
        text = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        self._send(rank, torch.tensor([text.numel()]), "it to listen")
        self._send(rank, text, "it to listen")

    def recv_json(self, rank: int, what: str) -> Any:
        """Wait for what a rank sends with `send_json`.

        Raises:
            PeerError: The rank is gone, silent, or sent nonsense.
        """
        size = torch.zeros(1, dtype=torch.int64)
        self._recv(rank, size, what)
        if not 0 < int(size) <= _MAX_JSON_BYTES:
            raise self._error(rank, f"sent a message of {int(size)} bytes in place of {what}")
        text = torch.empty(int(size), dtype=torch.uint8)
        self._recv(rank, text, what)
        try:
            return json.loads(text.numpy().tobytes())
        except ValueError:
            raise self._error(rank, f"sent no JSON in place of {what}") from None

    def send_bytes(self, rank: int, data: Tensor) -> None:
        """Send a vector of bytes on the host, whose length the other end knows."""
        if data.numel():
            self._send(rank, data, "it to take a tensor")

    def recv_bytes(self, rank: int, into: Tensor, what: str) -> None:
        """Fill a vector of bytes on the host."""
        if into.numel():
            self._recv(rank, into, what)

    def _send(self, rank: int, data: Tensor, what: str) -> None:
        moved = data.to(self._device)
        self._finish(rank, lambda: dist.isend(moved, rank, tag=_TAG), what)

    def _recv(self, rank: int, into: Tensor, what: str) -> None:
        moved = into if self._device.type == "cpu" else torch.empty_like(into, device=self._device)
        self._finish(rank, lambda: dist.irecv(moved, rank, tag=_TAG), what)
        if moved is not into:
            into.copy_(moved)

    def _finish(self, rank: int, start: Callable[[], Any], what: str) -> None:
        try:
            self._wait(start())
        except (RuntimeError, TimeoutError) as error:
            said = first_words(error)
            is_late = isinstance(error, TimeoutError) or "imed out" in said
            how = f"was silent for {self._limit_s:g} s" if is_late else "is gone"
            raise self._error(
                rank,
                f"{how}, while rank {self.rank} waited for {what}; the backend said: {said}",
            ) from error

    def _wait(self, work: Any) -> None:
        """Wait for an operation, and leave the links to other ranks as they are if it takes too long.

        A wait of gloo that expires closes the connections to all ranks, also to those that the leader
        has to tell. So a thread waits in its place, and for longer.
        """
        if not self.is_leader or self._device.type != "cpu":
            work.wait(datetime.timedelta(seconds=self._limit_s))
            return
        ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def wait() -> None:
            try:
                work.wait(datetime.timedelta(seconds=self._patience_s))
            except Exception as error:
                ended.put(error)
            else:
                ended.put(None)

        threading.Thread(target=wait, name="samo-link", daemon=True).start()
        try:
            error = ended.get(timeout=self._limit_s)
        except queue.Empty:
            raise TimeoutError("nothing") from None
        if error is not None:
            raise error

    def _error(self, rank: int, what: str) -> PeerError:
        return PeerError(
            f"rank {rank} {what}. Look at the log of that rank, and start the ranks again", (rank,)
        )


def _cuda_index() -> int:
    return torch.cuda.current_device()
