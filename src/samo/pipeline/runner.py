"""Run the stages of one rank: compute what the engine decides, and name a rank that fails.

A rank that has waited for half of the timeout probes the silent neighbour. A neighbour that is
itself waiting answers at once. One that is dead, stopped or stuck in its own computation does not,
and is reported when the timeout expires. The report is sent on as an "abort", so every rank raises
a `PeerError` that names the same rank.
"""

import datetime
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as record_function

from samo.errors import PeerError, SamoError, first_words
from samo.pipeline.engine import Action, Engine, MessageKind, Progress
from samo.pipeline.timeline import Event, Pass
from samo.pipeline.transport.base import Arrival, Transport
from samo.pipeline.transport.connect import Meeting
from samo.pipeline.transport.wire import Packet

__all__ = ["Batch", "Runner"]

Result = TypeVar("Result")

_ABORT_S: Final = 2.0
"""Seconds to send an "abort", or to wait for one after a collective has failed."""
_PATIENCE: Final = 3
"""Timeouts after which a neighbour that answers probes, and sends nothing else, is given up."""


@dataclass(frozen=True)
class Batch:
    """One rank's part of a batch. Only the first stage has inputs, only the last a loss.

    Without training, gradients are empty, and only say that a micro-batch is done.
    """

    num_micro_batches: int
    inputs: list[tuple[Tensor, ...]] | None = None
    loss: Callable[[int, Any], Tensor] | None = None  # weighted, by micro-batch and its output
    is_training: bool = True
    scale: Callable[[Tensor], Tensor] | None = None  # of a loss before backward
    seed: int | None = None  # of what layers draw; the first stage's counts


@dataclass
class _Held:
    """Tensors of a stage's micro-batches in flight."""

    inputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    gradients: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    loss: tuple[Tensor, ...] = ()  # one, once it is known
    seeds: dict[int, int | None] = field(default_factory=dict)


class Runner:
    """Computes batches on one rank: the layers and limits are those of each of its stages."""

    def __init__(
        self,
        layers: Sequence[Callable[..., Any]],
        transport: Transport,
        *,
        in_flight: Sequence[int],
        timeout_s: float,
        wire_dtype: torch.dtype | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        self.transport: Final = transport
        self.timeout_s: Final = timeout_s
        self.events: list[Event] = []
        self.steps = 0
        self.sent_bytes = 0
        self._num_stages: Final = transport.num_stages * len(layers)
        numbers = range(transport.stage, self._num_stages, transport.num_stages)
        self._layers: Final = dict(zip(numbers, layers))
        self._limits: Final = dict(zip(numbers, in_flight))
        self._failure: str | None = None
        self._wire_dtype: Final = wire_dtype
        self._meeting: Final = meeting  # where failures are recorded for ranks without a link
        self._broken: Final[dict[int, Exception]] = {}  # links by neighbour
        self._early: Final[list[Arrival]] = []  # data of the next batch

    def run(self, prepare: Callable[[], Batch]) -> Tensor:
        """Compute a batch and return its loss. If ``prepare`` raises, the other ranks are told."""
        self.events = []
        loss = self._guarded(lambda: self._compute_batch(prepare()))
        self.steps += 1
        return loss

    def run_collective(self, do: Callable[[], Result]) -> Result:
        """Run something that all ranks do together outside of a batch."""

        def attempt() -> Result:
            try:
                return do()
            except (SamoError, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                deadline = time.monotonic() + min(_ABORT_S, self.timeout_s)
                while self.transport.neighbours and time.monotonic() < deadline:
                    self._hear_reports(0.05)
                    self._raise_recorded()
                for stage, broken in self._broken.items():
                    self._fail(stage, _describe(broken), skip=stage)
                raise PeerError(
                    f"another rank did not join a collective ({first_words(error)}); restart all "
                    "ranks from the last checkpoint"
                ) from error

        return self._guarded(attempt)

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
            if self._broken and waited > _ABORT_S:
                stage = min(self._broken)
                self._fail(stage, _describe(self._broken[stage]), skip=stage)

    def _guarded(self, do: Callable[[], Result]) -> Result:
        """Return the result of ``do``; report a failure to the neighbours."""
        if self._failure is not None:
            raise PeerError(f"the pipeline failed earlier ({self._failure}); restart all ranks")
        neighbours = self.transport.neighbours
        try:
            result = do()
            late = self.transport.flush(self.timeout_s, neighbours)
            if late is not None:
                self._hear_reports()
                what = f"did not take what was sent to it for {self.timeout_s:g} s"
                self._fail(late, what, skip=late, is_timeout=True)
        except PeerError as error:
            self._failure = self._failure or str(error)
            raise
        except BaseException as error:
            if neighbours:  # a pipeline of one rank can run the next batch
                self._failure = f"{type(error).__name__}: {error}"
                if self._meeting is not None:
                    own = self.transport.ranks[self.transport.stage]
                    self._meeting.record_failure(own, self._failure)
                self._broadcast_abort(self.transport.stage, self._failure, neighbours)
            raise
        return result

    def _compute_batch(self, batch: Batch) -> Tensor:
        count = batch.num_micro_batches
        engine = Engine(
            Progress(stage, self._num_stages, count, limit) for stage, limit in self._limits.items()
        )
        held = {stage: _Held() for stage in self._layers}
        if batch.inputs is not None:
            held[0].inputs = dict(enumerate(batch.inputs))
            if batch.seed is not None:
                held[0].seeds = {i: _mixed(batch.seed, i) for i in range(count)}
        inbox = self.transport.inbox
        inbox.extendleft(reversed(self._early))
        self._early.clear()
        with torch.set_grad_enabled(batch.is_training):
            while True:
                while inbox:  # decide by everything that has come
                    self._take(inbox.popleft(), engine, held, batch)
                action = engine.next()
                if action.kind == "step":
                    break
                if action.kind == "receive":
                    self._wait(engine, held, batch)
                    continue
                if action.kind == "forward" or action.kind == "backward":
                    self._compute(action.kind, action, held[action.stage], batch)
                else:
                    self._send(action.kind, action, held[action.stage], batch.is_training)
                if not engine.is_sending:
                    self.transport.poll()
        (loss,) = held[self.transport.stage].loss
        return loss

    # Passes

    def _compute(self, what: Pass, action: Action, held: _Held, batch: Batch) -> None:
        start = time.perf_counter()
        with record_function(f"samo/{what}"):
            (self._forward if what == "forward" else self._backward)(action, held, batch)
        end = time.perf_counter()
        self.events.append(Event(start, end, action.stage, what, action.micro_batch))

    def _forward(self, action: Action, held: _Held, batch: Batch) -> None:
        micro_batch = action.micro_batch
        inputs = map(non_leaf, held.inputs[micro_batch])
        seed = held.seeds.get(micro_batch)
        output = self._layers[action.stage](*inputs, **({} if seed is None else {"seed": seed}))
        if action.stage < self._num_stages - 1:
            held.outputs[micro_batch] = as_tuple(output)
            return
        assert batch.loss is not None, "the rank of the last stage has the loss"
        loss = batch.loss(micro_batch, output)
        held.outputs[micro_batch] = (loss if batch.scale is None else batch.scale(loss),)
        held.loss = (held.loss[0] + loss.detach() if held.loss else loss.detach(),)

    def _backward(self, action: Action, held: _Held, batch: Batch) -> None:
        micro_batch, is_last = action.micro_batch, action.stage == self._num_stages - 1
        inputs, outputs = held.inputs.pop(micro_batch), held.outputs.pop(micro_batch)
        gradients = held.gradients.pop(micro_batch, ())
        if not batch.is_training:
            held.gradients[micro_batch] = ()
            return
        roots = [output for output in outputs if output.requires_grad]
        if not is_last and len(roots) != len(gradients):
            what = f"sent {len(gradients)} gradients for {len(roots)} outputs of {micro_batch}"
            self._fail(self._place(action.stage + 1), what)
        if roots:
            torch.autograd.backward(roots, None if is_last else gradients)
        held.gradients[micro_batch] = tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in inputs
            if tensor.requires_grad
        )

    # Packets

    def _place(self, stage: int) -> int:
        """Return the place of the rank that has a stage."""
        return stage % self.transport.num_stages

    def _send(self, kind: MessageKind, action: Action, held: _Held, is_training: bool) -> None:
        micro_batch, target = action.micro_batch, action.stage - 1
        if kind == "activation":
            tensors, target = held.outputs[micro_batch], action.stage + 1
        else:
            tensors = held.gradients.pop(micro_batch) if kind == "gradient" else held.loss
        flags = tuple(tensor.requires_grad for tensor in tensors)
        values = tuple(tensor.detach() for tensor in tensors)
        narrow: tuple[bool, ...] = ()
        if self._wire_dtype is not None and kind != "loss":
            narrow = tuple(tensor.dtype == torch.float32 for tensor in values)
            values = tuple(
                tensor.to(self._wire_dtype) if is_narrow else tensor
                for tensor, is_narrow in zip(values, narrow)
            )
        self.sent_bytes += sum(tensor.nbytes for tensor in values)
        seed = held.seeds.get(micro_batch)
        packet = Packet(
            kind, self.steps, micro_batch, target, values, flags, narrow, "", is_training, seed
        )
        self.transport.send(self._place(target), packet)

    def _take(self, arrival: Arrival, engine: Engine, held: dict[int, _Held], batch: Batch) -> bool:
        """Take an arrival; return whether it was data of this batch."""
        sender, packet = arrival.stage, self._handle(arrival)
        if packet is None:
            return False
        kind = packet.kind
        if kind != "activation" and kind != "gradient" and kind != "loss":
            return False
        if packet.step == self.steps + 1 and sender not in self._due(engine):
            self._early.append(arrival)  # it has ended this batch, as this rank is about to
            return False
        if packet.step != self.steps:
            self._fail(sender, f"sent {kind} of batch {packet.step} in batch {self.steps}")
        if packet.is_training != batch.is_training:
            ours, theirs = ("step", "eval") if batch.is_training else ("eval", "step")
            self._fail(sender, f"called {theirs}() where this rank called {ours}()")
        source = packet.stage + (-1 if kind == "activation" else 1)
        if packet.stage not in held or sender != self._place(source):
            self._fail(sender, f"sent {kind} for stage {packet.stage}, which is not on this rank")
        try:
            engine.stages[packet.stage].receive(kind, packet.micro_batch)
        except ValueError as error:
            self._fail(sender, str(error))
        own, tensors = held[packet.stage], packet.tensors
        if any(packet.is_narrow):
            tensors = tuple(
                tensor.float() if is_narrow else tensor
                for tensor, is_narrow in zip(tensors, packet.is_narrow)
            )
        if kind == "activation":
            own.seeds[packet.micro_batch] = packet.seed
            own.inputs[packet.micro_batch] = tuple(
                tensor.requires_grad_(flag)
                for tensor, flag in zip(tensors, packet.needs_grad, strict=True)
            )
        elif kind == "gradient":
            own.gradients[packet.micro_batch] = tensors
        else:
            own.loss = tensors
        return True

    def _wait(self, engine: Engine, held: dict[int, _Held], batch: Batch) -> None:
        """Wait for data; meanwhile answer probes, and watch the clock."""
        begin = time.monotonic()
        heard = dict.fromkeys(self.transport.neighbours, begin)
        probed: set[int] = set()
        while True:
            now = time.monotonic()
            is_late = now - begin >= self.timeout_s / 2
            for stage in self._due(engine) if is_late or self._broken else ():
                silence = now - heard[stage]
                if stage in self._broken:
                    self._fail(stage, _describe(self._broken[stage]), skip=stage)
                if silence >= self.timeout_s:
                    what = f"has been silent for {silence:.1f} s"
                    self._fail(stage, what, skip=stage, is_timeout=True)
                if now - begin > _PATIENCE * self.timeout_s:
                    what = f"is alive, but has sent no data for {now - begin:.1f} s"
                    self._fail(stage, what, skip=stage, is_timeout=True)
                if silence >= self.timeout_s / 2 and stage not in probed:
                    probed.add(stage)
                    self.transport.send(stage, Packet("probe", self.steps))
            arrival = self.transport.receive(max(0.01, self.timeout_s / 8))
            if arrival is not None:
                if self._take(arrival, engine, held, batch):
                    return
                heard[arrival.stage] = time.monotonic()
                probed.discard(arrival.stage)

    def _due(self, engine: Engine) -> set[int]:
        """Return the neighbours that have more to send in this batch."""
        return {self._place(stage) for stage in engine.senders()}

    def _handle(self, arrival: Arrival) -> Packet | None:
        """Return a packet after answering a probe; raise an "abort". None if the link broke.

        A neighbour that has ended its batch may exit: a broken link is an error only if more is due
        from it.
        """
        stage, packet, error = arrival
        if isinstance(error, ValueError):  # the sender is alive, and is told too
            self._fail(stage, str(error))
        if packet is None:
            assert error is not None, "an arrival has a packet or an error"
            self._broken[stage] = error
            return None
        if packet.kind == "abort":
            self._fail(packet.stage, packet.reason, skip=stage)
        if packet.kind == "probe" and packet.step == self.steps:
            self.transport.send(stage, Packet("alive", self.steps))
        return packet

    # Failures

    def _hear_reports(self, timeout_s: float = 0.0) -> None:
        """Raise the failure that a neighbour has reported, if any; keep data for the next batch."""
        inbox = self.transport.inbox
        self.transport.poll(timeout_s)
        for _ in range(len(inbox)):
            arrival = inbox.popleft()
            packet = self._handle(arrival)
            if packet is not None and packet.kind not in ("probe", "alive"):
                inbox.append(arrival)

    def _raise_recorded(self) -> None:
        """Raise the failure that a rank without a link to this one has recorded, if any."""
        failure = None if self._meeting is None else self._meeting.failure()
        if failure is not None:
            rank, what = failure
            text = f"rank {rank} {what}. Restart all ranks from the last checkpoint"
            raise PeerError(text, rank=rank)

    def _fail(
        self, origin: int, what: str, *, skip: int | None = None, is_timeout: bool = False
    ) -> NoReturn:
        """Report that ``origin`` failed to the neighbours other than ``skip``, and raise."""
        transport = self.transport
        self._broadcast_abort(origin, what, [s for s in transport.neighbours if s != skip])
        rank = dict(enumerate(transport.ranks)).get(origin)  # a peer may send any number
        if self._meeting is not None and rank is not None:
            self._meeting.record_failure(rank, what)
        raise PeerError(
            f"rank {rank} (stage {origin} of {transport.num_stages}) {what}. Stage "
            f"{transport.stage} lost its batch: restart all ranks from the last checkpoint",
            rank=rank,
            stage=origin,
            is_timeout=is_timeout,
        )

    def _broadcast_abort(self, origin: int, what: str, stages: Iterable[int]) -> None:
        for stage in stages:
            self.transport.send(stage, Packet("abort", self.steps, stage=origin, reason=what))
        self.transport.flush(min(_ABORT_S, self.timeout_s), stages)


def _mixed(seed: int, micro_batch: int) -> int:
    """Return a seed of 47 bits for a micro-batch."""
    return (seed + (micro_batch + 1) * 0x9E3779B97F4A7C15) % 2**47


def _describe(error: Exception) -> str:
    return f"is gone ({error})"


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """Return a stage's output as a tuple of tensors."""
    outputs = (output,) if isinstance(output, Tensor) else output
    if not isinstance(outputs, tuple | list) or not all(isinstance(t, Tensor) for t in outputs):
        raise TypeError(
            "the last layer of a stage must return a tensor or a tuple of tensors, got "
            f"{type(output).__name__}; wrap the layer, or cut elsewhere"
        )
    return tuple(outputs)


def non_leaf(tensor: Tensor) -> Tensor:
    """Return a received tensor as a non-leaf, so that a layer may change it in place."""
    is_inside = tensor.requires_grad and torch.is_grad_enabled()
    return _Alias.apply(tensor) if is_inside else tensor  # type: ignore[no-untyped-call]


class _Alias(torch.autograd.Function):
    """The identity. Its output shares memory with the leaf, without autograd seeing a view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
