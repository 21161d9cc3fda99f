"""Links over TCP: order, large messages, broken connections, and ranks that do not come."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

import samo
from samo.distributed import store
from samo.pipeline.transport import connect
from samo.pipeline.transport.tcp import Link, Transport
from samo.pipeline.transport.wire import Packet


def received(transport: Transport) -> Any:
    """Return the next packet, or what broke the link."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        if transport.inbox:
            return transport.inbox.popleft()[1]
        if transport.broken:
            return next(iter(transport.broken.values()))
        transport.poll(0.1)
    pytest.fail("nothing has come")


def test_large_messages_do_not_block_and_arrive_in_order_as_they_were(
    pair: list[Transport],
) -> None:
    first, second = pair
    tensors = [torch.randn(2**20), torch.randn(3), torch.randn(2**22, dtype=torch.float64)]
    wanted = [tensor.clone() for tensor in tensors]
    for number, tensor in enumerate(tensors):  # nobody reads yet
        first.send(1, Packet("activation", 0, number, tensors=(tensor,)))
        tensor.zero_()  # as a layer that works in place does with its output
    assert not first.is_sent(1)
    assert first.flush(0.05, [1]) == 1
    for number, values in enumerate(wanted):
        with torch.device("meta"):  # a default device of the caller's
            packet = received(second)
        assert packet.micro_batch == number
        assert torch.equal(packet.tensors[0], values)
    assert first.flush(5.0, [1]) is None
    second.poll(0.01)
    assert not second.inbox
    assert not [thread for thread in threading.enumerate() if thread.name == "samo-push"]


def test_what_was_sent_before_a_link_broke_is_read_before(pair: list[Transport]) -> None:
    first, second = pair
    second.send(0, Packet("probe", 0))  # unread: such a connection is reset
    first.send(1, Packet("abort", 0, stage=0, reason="OSError: disk"))
    first.close()
    assert received(second).reason == "OSError: disk"
    assert isinstance(received(second), ConnectionError)
    second.poll(0.01)
    assert not second.inbox
    second.send(0, Packet("activation", 0, tensors=(torch.ones(2**21),)))
    assert second.flush(5.0, [0]) is None  # never will be


def test_closing_drops_what_a_neighbour_does_not_take(pair: list[Transport]) -> None:
    first, second = pair
    first.send(1, Packet("activation", 0, tensors=(torch.ones(2**22),)))
    begin = time.monotonic()
    first.close()
    assert time.monotonic() - begin < 2.0
    assert not [thread for thread in threading.enumerate() if thread.name == "samo-push"]
    assert isinstance(received(second), ConnectionError)


def test_nothing_counts_as_sent_before_the_socket_has_taken_it(pair: list[Transport]) -> None:
    first, second = pair
    idle: list[bool] = []  # at every line of the thread that sends

    def look(*_: object) -> Any:
        idle.append(first.is_sent(1))
        return look

    before = threading.gettrace()
    threading.settrace(look)
    try:
        first.send(1, Packet("activation", 0, tensors=(torch.ones(2**22),)))
        received(second)
        assert first.flush(5.0, [1]) is None
    finally:
        threading.settrace(before)  # type: ignore[arg-type]
    assert idle == sorted(idle)


def test_a_sender_sleeps_whatever_the_number_of_its_socket(pair: list[Transport]) -> None:
    connection = pair[0].links[1].connection
    number = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, 1024)  # too high for select.select()
    link = Link(socket.socket(fileno=number))
    begin = time.process_time()
    link.send(Packet("activation", 0), torch.ones(2**24, dtype=torch.uint8))
    time.sleep(0.5)
    assert not link.is_idle
    assert time.process_time() - begin < 0.1
    link.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_neither_ends_links_nor_keeps_them_open(pair: list[Transport]) -> None:
    first, second = pair
    reader, writer = os.pipe()
    if not (child := os.fork()):
        first.close()  # as an exit handler, or garbage collection, does
        os.write(writer, b"1")
        time.sleep(10.0)
        os._exit(0)
    try:
        os.read(reader, 1)
        first.send(1, Packet("probe", 0))
        assert received(second).kind == "probe"
        first.close()
        assert isinstance(received(second), ConnectionError)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("place", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_come_is_named(place: int, missing: int) -> None:
    meeting = connect.Meeting((4, 7), place, timeout_s=0.2)
    with pytest.raises(samo.PeerError, match=r"did not connect within 0\.2 s") as caught:
        meeting.links()
    assert (caught.value.stage, caught.value.is_timeout) == (missing, True)


@pytest.mark.usefixtures("one_rank")
def test_an_address_that_cannot_be_reached_is_named_at_once() -> None:
    meeting = connect.Meeting((4, 7), 1, timeout_s=20.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = {"host": "127.0.0.1", "port": port, "token": "00" * 16}
    meeting.store.set("0", json.dumps(address))
    wanted = rf"rank 4 \(stage 0 of 2\) cannot be reached at 127\.0\.0\.1, port {port} .*refused"
    with pytest.raises(samo.PeerError, match=wanted) as caught:
        meeting.links()
    assert (caught.value.rank, caught.value.is_timeout) == (4, False)


def meeting_of_another_process(
    ranks: tuple[int, ...], place: int, **settings: Any
) -> connect.Meeting:
    store._counts.clear()
    return connect.Meeting(ranks, place, 5.0, **settings)


@pytest.mark.usefixtures("one_rank")
def test_a_stranger_that_connects_is_ignored() -> None:
    meetings = [meeting_of_another_process((0, 1), place, is_ring=True) for place in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meetings[0].links)
        address = json.loads(meetings[0].store.get("0"))
        with socket.create_connection((address["host"], address["port"])) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n and more")
            second = pool.submit(meetings[1].links)
            ends = first.result(10.0)[1], second.result(10.0)[0]
    ends[0].sendall(b"hello")
    ends[1].setblocking(True)
    assert ends[1].recv(5) == b"hello"
    for end in ends:
        end.close()


@pytest.mark.usefixtures("one_rank")
def test_failures_are_shared_by_replicas_alone() -> None:
    first = meeting_of_another_process((0, 1), 0, everyone=(0, 1, 2, 3))
    replica = meeting_of_another_process((2, 3), 0, everyone=(0, 1, 2, 3))
    other = meeting_of_another_process((4, 5), 0, everyone=(4, 5))
    first.record_failure(1, "is gone")
    replica.record_failure(0, "is gone, too")
    assert first.failure() == replica.failure() == (1, "is gone")
    assert other.failure() is None
    replica = meeting_of_another_process((2, 3), 0, everyone=(0, 1, 2, 3))
    assert replica.failure() == (1, "is gone")
    assert connect.Meeting((2, 3), 0, 5.0, everyone=(0, 1, 2, 3)).failure() is None  # the next


SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


def test_a_store_whose_process_is_stopped_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_STORE_S", 0.2)
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()))
        dist.init_process_group(store=store, rank=0, world_size=1)
        try:
            meeting = connect.Meeting((0, 1), 0, 5.0, everyone=(0, 1))
            meeting.record_failure(1, "is gone")
            assert meeting.failure() == (1, "is gone")
            server.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)  # its threads may run on
            begin = time.monotonic()
            for _ in range(10):
                assert meeting.failure() is None
            meeting.record_failure(1, "is gone")
            assert time.monotonic() - begin < 2.0
        finally:
            server.kill()
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("host", "own", "found"),
    [
        ("127.0.0.1", "127.0.0.1", ("127.0.0.1", "127.0.0.1")),
        ("localhost", "::1", ("localhost", "::1")),
        ("node1", "127.0.1.1", ("node1", "")),  # as Debian's /etc/hosts has it
        ("node1", "10.0.0.7", ("10.0.0.7", "10.0.0.7")),
    ],
)
def test_ranks_listen_where_they_reach_the_store(
    host: str, own: str, found: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = MagicMock()
    probe().__enter__().getsockname.return_value = (own, 1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (host, 9))])
    monkeypatch.setattr(socket, "socket", probe)
    inner = SimpleNamespace(host=host)
    assert connect._host_of(SimpleNamespace(underlying_store=inner)) == found
