"""What ranks say to each other while they save or load together.

    save      others -> leader      a share, or why there is none; replicas have none to give, and
                                    ranks with rows of tensors nothing but those
              leader -> other       a tensor that it wants             } for each one,
              other  -> leader      its bytes, or why there are none   } as files are written
              leader -> others      the end, good or bad
    load      others -> leader      whether all checks passed, as an empty share
              leader -> others      the end: whether they did everywhere

Nobody is left waiting: whatever fails on a rank, all of them learn why and raise.
"""

import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from samo.checkpoint.merging import Origin
from samo.checkpoint.tensors import Source, dtype_of, host_bytes
from samo.distributed.links import Links
from samo.errors import CheckpointError, PeerError

__all__ = []

Sources = Mapping[str, Mapping[str, Source]]


def lead(
    links: Links,
    describe: Callable[[], Mapping[str, Any]],
    write: Callable[[dict[int, Mapping[str, Any]]], None],
    what: str,
) -> None:
    """Hear the shares of all stages, write, and tell everyone how it ended.

    Raises:
        CheckpointError: Another rank has nothing to give.
        PeerError: Another rank is gone or silent.
    """
    try:
        try:
            shares = {links.rank: describe()}
        finally:  # also if this rank has none: the others are sending
            answers = {rank: links.recv_json(rank, what) for rank in links.others}
        for rank, answer in answers.items():
            if answer.get("failure") is not None:
                _raise(rank, answer["failure"])
            if answer["share"] is not None:
                shares[rank] = answer["share"]
        write(shares)
    except BaseException as error:
        _end(links, error)
        raise
    _end(links, None)


def follow(
    links: Links, describe: Callable[[], tuple[Mapping[str, Any] | None, Sources]], what: str
) -> None:
    """Send a share to the leader, and what it asks for, until it is done.

    Raises:
        CheckpointError: It failed, for whatever reason.
        PeerError: The leader is gone or silent, or lost another rank.
    """
    leader = links.ranks[0]
    failure: BaseException | None = None
    share: Mapping[str, Any] | None = None
    sources: Sources = {}
    try:
        share, sources = describe()
    except BaseException as error:
        failure = error
    links.send_json(leader, {"share": share, "failure": _told(failure)})
    while True:
        order = links.recv_json(leader, what)
        if "end" in order:
            break
        failure = _give(links, sources, order) or failure
    if failure is not None:
        raise failure
    if order["end"] is not None:
        _raise(order["from"], order["end"])


def fetched(links: Links | None, kind: str, name: str, origin: Origin, own: Sources) -> Source:
    """Return a tensor that is fetched from the ranks that have it when its turn comes."""
    if links is None or (origin.rank == links.rank and not origin.pieces):
        return own[kind][name]
    dtype = dtype_of(origin.dtype)

    def make() -> Tensor:
        found = torch.empty(origin.shape, dtype=dtype)
        if not origin.pieces:
            _fetch(links, origin.rank, kind, name, found.view(-1).view(torch.uint8))
        for rank, start, stop in origin.pieces:
            room = found[start:stop]
            if rank == links.rank:
                room.copy_(own[kind][name].make())
            elif room.numel():
                _fetch(links, rank, kind, name, room.view(-1).view(torch.uint8))
        return found

    return Source(dtype, origin.shape, make)


def agree(links: Links | None, failure: BaseException | None, what: str) -> None:
    """Raise on all ranks if there is a failure on any; a rank's own is raised as it is.

    Raises:
        CheckpointError: Another rank failed.
        PeerError: Another rank is gone or silent.
    """

    def describe() -> dict[str, Any]:
        if failure is not None:
            raise failure
        return {}

    if links is None:
        describe()
    elif links.is_leader:
        lead(links, describe, lambda shares: None, what)
    else:
        follow(links, lambda: (describe(), {}), what)


def _fetch(links: Links, rank: int, kind: str, name: str, room: Tensor) -> None:
    what = f"'{name}' ({kind})"
    links.send_json(rank, {"kind": kind, "name": name})
    answer = links.recv_json(rank, what)
    if answer.get("failure") is not None:
        _raise(rank, answer["failure"])
    if answer["bytes"] != room.numel():
        raise CheckpointError(
            f"rank {rank} has {answer['bytes']:,} bytes of {what} and said it had {room.numel():,}; did "
            "another thread change the model while it was saved?"
        )
    links.recv_bytes(rank, room, what)


def _give(links: Links, sources: Sources, order: Mapping[str, str]) -> BaseException | None:
    """Send what the leader asks for; return why that was not possible."""
    leader = links.ranks[0]
    try:
        data = host_bytes(sources[order["kind"]][order["name"]].make())
    except BaseException as error:
        links.send_json(leader, {"failure": _told(error)})
        return error
    links.send_json(leader, {"bytes": data.numel()})
    links.send_bytes(leader, data)
    return None


def _end(links: Links, failure: BaseException | None) -> None:
    told = {"end": _told(failure), "from": links.rank}
    lost = failure.ranks if isinstance(failure, PeerError) else ()
    for rank in links.others:
        if rank not in lost:
            with suppress(PeerError):  # it is gone too, and the others have to know all the same
                links.send_json(rank, told)


def _told(failure: BaseException | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "message": str(failure) or traceback.format_exception_only(failure)[-1].strip(),
        "kind": type(failure).__name__,
        "ranks": list(failure.ranks) if isinstance(failure, PeerError) else [],
    }


def _raise(rank: int, told: Mapping[str, Any]) -> NoReturn:
    message = str(told["message"])
    if told["kind"] == PeerError.__name__:
        raise PeerError(message, tuple(told["ranks"]))
    if told["kind"] == CheckpointError.__name__:
        raise CheckpointError(message)
    raise CheckpointError(f"rank {rank} failed: {told['kind']}: {message}")
