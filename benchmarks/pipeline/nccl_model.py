"""A model of GPUs and NCCL in virtual time, on which the runner and its transport run as they are.

- A stream executes in order. Streams share a few hardware queues; an operation that is not ready,
  because its stream or an event holds it up, blocks everything behind it in its queue.
- A send or receive runs until its peer has started the matching one. Communicators have two ranks,
  keep order and know no tags; they must be created by both ranks.
- Hosts are threads that take turns, one at a time, by a clock of the model: calls, kernels,
  transfers and headers take random times.

A *deadlock* is when nothing can happen any more. A *race* is when an operation starts that reads
memory before the operation that writes it is done.
"""

import heapq
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn

from samo.pipeline.peers import Peers
from samo.pipeline.runner import Batch, Runner
from samo.pipeline.transport import nccl
from samo.pipeline.transport.wire import HEADER_BYTES, Packet, decode, encode, pack

POOL: Final = 32
"""Streams that torch creates on a device before it gives out the first one again."""


class Over(BaseException):
    """Ends the threads of a world that is over."""


class World:
    """Virtual time, and the threads that live in it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.races = 0
        self.is_over = False
        self.memory: list[Any] = []  # nothing is freed, so that no address is used twice
        self.agents: list[Agent] = []
        self.baton = threading.Semaphore(0)
        self._agenda: list[tuple[float, int, Callable[[], None], bool]] = []
        self._count = 0

    def at(self, delay: float, do: Callable[[], None], *, is_agent: bool = False) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (self.now + delay, self._count, do, is_agent))

    def pass_time(self, delay: float) -> float:
        """Let time pass in the thread that runs, up to the turn of another; return what is left."""
        until = self.now + delay
        while self._agenda and self._agenda[0][0] <= until and not self._agenda[0][3]:
            self.now, _, do, _ = heapq.heappop(self._agenda)
            do()
        if self._agenda and self._agenda[0][0] <= until:
            return until - self.now
        self.now = until
        return 0.0

    def some(self, mean: float) -> float:
        """Return a random time: often short, at times ten times the mean."""
        return self.random.lognormvariate(-0.5, 1.0) * mean

    def run(self) -> None:
        """Run until nothing can happen any more."""
        while self._agenda:
            self.now, _, do, _ = heapq.heappop(self._agenda)
            do()

    def end(self) -> None:
        self.is_over = True
        for agent in self.agents:
            agent.lock.release()
            agent.thread.join()


class Agent:
    """A thread of a rank's process."""

    here = threading.local()

    def __init__(self, world: World, device: "Device", work: Callable[[], Any]) -> None:
        self.world, self.device = world, device
        self.stream = device.default
        self.lock = threading.Semaphore(0)
        self.is_asleep = self.is_done = False
        self.result: Any = None
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        world.agents.append(self)
        device.agents.append(self)
        self.thread.start()
        world.at(world.some(1.0), self._resume, is_agent=True)

    def pause(self, mean: float) -> None:
        """Let time pass; at times much, when the thread loses its core or the interpreter."""
        is_lost = self.world.random.random() < 0.02
        left = self.world.pass_time(self.world.some(20.0 if is_lost else mean))
        if left:
            self.world.at(left, self._resume, is_agent=True)
            self._switch()

    def sleep(self) -> None:
        """Let time pass until something happens on this rank."""
        self.is_asleep = True
        self._switch()

    def wake(self) -> None:
        if self.is_asleep:
            self.is_asleep = False
            self.world.at(self.world.some(0.2), self._resume, is_agent=True)

    def _resume(self) -> None:
        self.lock.release()
        self.world.baton.acquire()

    def _switch(self) -> None:
        if not self.world.is_over:
            self.world.baton.release()
            self.lock.acquire()
        if self.world.is_over:
            raise Over

    def _run(self, work: Callable[[], Any]) -> None:
        Agent.here.agent = self
        self.lock.acquire()
        try:
            if not self.world.is_over:
                self.result = work()
        except Over:
            return
        except Exception as error:
            self.result = error
        self.is_done = True
        if not self.world.is_over:
            self.world.baton.release()


def agent() -> Agent:
    """Return the thread that runs."""
    found: Agent = Agent.here.agent
    return found


class Op:
    """An operation in a stream."""

    def __init__(
        self,
        stream: "Stream",
        start: Callable[["Op"], None],
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        after: Sequence["Op"] = (),
    ) -> None:
        self.stream, self.start = stream, start
        self.is_done = False
        self.reads = [_address(tensor) for tensor in reads]
        self.after = [*after, *([stream.last] if stream.last else [])]
        device = stream.device
        device.world.memory += [*reads, *writes]
        for tensor in writes:
            device.writers[_address(tensor)] = self
        stream.last = self
        device.queues[stream.number % len(device.queues)].append(self)
        device.issue()

    def end(self) -> None:
        self.is_done = True
        self.stream.device.num_running -= 1
        self.stream.device.issue()
        self.stream.device.wake()


class Event:
    """A point of a stream."""

    def __init__(self, op: Op | None) -> None:
        self.op = op

    def query(self) -> bool:
        agent().pause(0.02)
        return self.op is None or self.op.is_done


class Stream:
    """Executes in order."""

    def __init__(self, device: "Device", number: int) -> None:
        self.device, self.number = device, number
        self.last: Op | None = None

    def record_event(self) -> Event:
        return Event(self.last)

    def wait_event(self, event: Event) -> None:
        if event.op is not None and not event.op.is_done:
            Op(self, Op.end, after=[event.op])


ModelStream = Stream  # a device has a method of the same name


class Device:
    """A GPU; also stands for ``torch.cuda``."""

    def __init__(self, world: World, num_queues: int) -> None:
        self.world = world
        self.agents: list[Agent] = []
        self.queues: list[deque[Op]] = [deque() for _ in range(num_queues)]
        self.writers: dict[int, Op] = {}
        self.num_running = 0
        self.default = Stream(self, 0)
        self._pool = [Stream(self, 1 + number) for number in range(POOL)]
        self._given = 0

    def issue(self) -> None:
        """Start what is at the head of a queue and ready."""
        for queue in self.queues:
            while queue and all(op.is_done for op in queue[0].after):
                op = queue.popleft()
                for address in op.reads:
                    writer = self.writers.get(address)
                    if writer is not None and writer is not op and not writer.is_done:
                        self.world.races += 1
                self.num_running += 1
                op.start(op)

    def wake(self) -> None:
        for one in self.agents:
            one.wake()

    def kernel(self, reads: Sequence[Tensor], writes: Sequence[Tensor], mean: float) -> None:
        """Launch a kernel on the current stream."""
        agent().pause(0.05)
        Op(agent().stream, lambda op: self.world.at(self.world.some(mean), op.end), reads, writes)

    # As torch.cuda

    def Stream(self, device: object = None) -> ModelStream:  # noqa: N802
        self._given += 1
        return self._pool[self._given % POOL]

    def current_stream(self, device: object = None) -> ModelStream:
        return agent().stream

    @contextmanager
    def stream(self, stream: ModelStream) -> Iterator[None]:
        before, agent().stream = agent().stream, stream
        yield
        agent().stream = before


class Comm:
    """A communicator of a sending and a receiving rank, each with an end of its own."""

    def __init__(self, world: World, devices: Sequence[Device], *, is_created: bool) -> None:
        self.world, self.devices = world, devices
        self.streams = [device.Stream() for device in devices]
        self.posted: list[deque[tuple[Op, Tensor]]] = [deque(), deque()]
        self.created = {0, 1} if is_created else set()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "Work":
        return self._post(0, tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> "Work":
        return self._post(1, tensors[0])

    def _post(self, side: int, tensor: Tensor) -> "Work":
        self._create(side)
        agent().pause(0.1)
        stream = self.streams[side]
        # torch has a stream for each communicator, which waits for the current one.
        stream.wait_event(agent().stream.record_event())
        both = ([tensor], []) if side == 0 else ([], [tensor])
        return Work(Op(stream, lambda op: self._start(side, op, tensor), *both))

    def _create(self, side: int) -> None:
        """Wait for the other rank, and for the GPU, if the communicator is not there yet."""
        if side not in self.created:
            self.created.add(side)
            for device in self.devices:
                device.wake()
            while len(self.created) < 2 or self.devices[side].num_running:
                agent().sleep()  # NCCL allocates memory, which may wait for all kernels

    def _start(self, side: int, op: Op, tensor: Tensor) -> None:
        self.posted[side].append((op, tensor))
        while self.posted[0] and self.posted[1]:
            (send, source), (recv, target) = self.posted[0].popleft(), self.posted[1].popleft()

            self.world.at(self.world.some(1.0), partial(self._end, send, source, recv, target))

    @staticmethod
    def _end(send: Op, source: Tensor, recv: Op, target: Tensor) -> None:
        target.copy_(source)
        send.end()
        recv.end()

    def abort(self) -> None:
        """Called when a transport is closed."""


class Work:
    """A transfer under way."""

    def __init__(self, op: Op) -> None:
        self.op = op

    def is_completed(self) -> bool:
        return Event(self.op).query()

    def wait(self) -> None:
        """Let the current stream wait, as with NCCL."""
        agent().stream.wait_event(Event(self.op))


class Wire:
    """A directed link for headers."""

    def __init__(self, world: World, target: Device) -> None:
        self.world, self.target = world, target
        self.arrived: deque[Any] = deque()
        self._under_way: deque[bytes] = deque()
        self._last = 0.0

    def send(self, packet: Packet) -> None:
        agent().pause(0.05)
        self._under_way.append(encode(packet))
        when = max(self.world.now + self.world.some(0.5), self._last)
        self._last = when
        self.world.at(when - self.world.now, self._arrive)

    def _arrive(self) -> None:
        raw = self._under_way.popleft()
        self.arrived.append(decode(raw[:HEADER_BYTES], raw[HEADER_BYTES:]))
        self.target.wake()


class ModelLink:
    """Both directions of the headers between two ranks."""

    is_idle = True

    def __init__(self, out: Wire, back: Wire) -> None:
        self.out, self.back = out, back

    def send(self, packet: Packet, body: None = None) -> None:
        self.out.send(packet)


class NcclOnTheModel(nccl.NcclTransport):
    """The transport, whose headers travel, and whose host waits, in the model."""

    def __init__(
        self, place: int, num_ranks: int, links: Any, comms: dict[int, Any], device: Device
    ) -> None:
        super().__init__(place, range(num_ranks), {}, torch.device("cpu"), comms, cuda=device)
        self.links.update(links)

    def _wait(self, timeout_s: float, is_busy: bool) -> None:
        agent().pause(0.02)
        links: Any = self.links
        while True:
            is_new = False
            for place, link in links.items():
                while link.back.arrived:
                    packet, layout = link.back.arrived.popleft()
                    self._take(place, packet, layout, None)
                    is_new = True
            under_way = [t for c in self._channels.values() for t in (c.sending, c.receiving) if t]
            is_done = any([transfer.work.is_completed() for transfer in under_way])
            if is_new or is_done or timeout_s == 0:
                return
            agent().sleep()

    def _hand_over(self, body: Tensor) -> None:
        pass


class Layer(nn.Module):
    """Kernels of random length in both passes; its output may be non-contiguous."""

    def __init__(self, device: Device, mean: float, is_turned: bool) -> None:
        super().__init__()
        self.device, self.mean, self.is_turned = device, mean, is_turned

    def forward(self, x: Tensor) -> Tensor:
        return _Pass.apply(x, self)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        y = x * 1.5 + 1.0
        layer.device.kernel([x], [y], layer.mean)
        return y.t() if layer.is_turned else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layer, (grad,) = ctx.layer, grads
        found = grad * 1.5
        layer.device.kernel([grad], [found], 2 * layer.mean)
        return found.t() if layer.is_turned else found, None


def loss(device: Device) -> Callable[[int, Tensor], Tensor]:
    def compute(micro_batch: int, output: Tensor) -> Tensor:
        found = (output * (micro_batch + 1)).sum()
        device.kernel([output], [found], 0.2)
        return found

    return compute


@dataclass(frozen=True)
class Case:
    """What a timing is tried on."""

    num_ranks: int
    num_micro_batches: int
    num_queues: int
    is_turned: bool  # whether stages return non-contiguous tensors

    @classmethod
    def draw(cls, seed: int) -> "Case":
        draw = random.Random(seed)
        return cls(
            draw.randint(2, 4), draw.randint(2, 6), draw.choice((1, 2, 8)), draw.random() < 0.5
        )

    def inputs(self, seed: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(seed)
        # Small whole numbers, whose sums are exact in any order.
        return [
            torch.randint(16, (3, 3), generator=draw).float() for _ in range(self.num_micro_batches)
        ]

    def loss(self, seed: int) -> Tensor:
        """Return the loss of a batch, computed without a pipeline."""
        found = []
        for number, y in enumerate(self.inputs(seed)):
            for _ in range(self.num_ranks):
                y = y * 1.5 + 1.0
                y = y.t() if self.is_turned else y
            found.append((y * (number + 1)).sum())
        return sum(found[1:], found[0])


def try_timing(
    make: Callable[..., NcclOnTheModel], seed: int, case: Case, *, is_eager: bool = True
) -> tuple[str, list[Any]]:
    """Train two batches at one random timing.

    ``make`` builds a rank's transport from its place, number of ranks, links, communicators and
    device. Returns "", "deadlock" or "race", and the losses of each rank.
    """
    world, num_ranks = World(seed), case.num_ranks
    devices = [Device(world, case.num_queues) for _ in range(num_ranks)]
    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if abs(a - b) == 1]
    wires = {(a, b): Wire(world, devices[b]) for a, b in pairs}
    comms = {(a, b): Comm(world, [devices[a], devices[b]], is_created=is_eager) for a, b in pairs}
    inputs = [(x,) for x in case.inputs(seed)]
    rates = [world.some(3.0) for _ in range(num_ranks)]

    def work(place: int) -> list[Tensor]:
        device, around = devices[place], [b for a, b in pairs if a == place]
        links = {b: ModelLink(wires[place, b], wires[b, place]) for b in around}
        both = {b: (comms[place, b], comms[b, place]) for b in around}
        transport = make(place, num_ranks, links, both, device)
        layer = Layer(device, rates[place], case.is_turned)
        runner = Runner([layer], Peers(transport, timeout_s=1e6), [num_ranks])
        batch = Batch(
            case.num_micro_batches,
            inputs if place == 0 else None,
            loss(device) if place == num_ranks - 1 else None,
        )
        return [runner.run(lambda: batch) for _ in range(2)]

    with mock.patch.object(nccl, "pack", model_pack):
        runners = [Agent(world, device, partial(work, n)) for n, device in enumerate(devices)]
        world.run()
        is_idle = not any(queue for device in devices for queue in device.queues)
        is_done = is_idle and all(one.is_done for one in runners)  # hosts may be ahead of GPUs
        world.end()
    for one in runners:
        if isinstance(one.result, Exception):
            raise one.result
    if not is_done:
        return "deadlock", []
    return "race" if world.races else "", [one.result for one in runners]


def model_pack(tensors: Sequence[Tensor]) -> Tensor:
    """Pack as the transport does, with a kernel where it copies."""
    body = pack(tensors)
    if len(tensors) > 1 or not tensors[0].is_contiguous():
        agent().device.kernel(tensors, [body], 0.2)
    return body


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
