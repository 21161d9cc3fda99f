"""Run one stage: compute the passes that the engine decides on, exchange packets, and name a rank that fails.

A stage that has waited for half of the timeout probes the silent neighbour. A neighbour that is
itself waiting answers at once. One that is dead, stopped or stuck in its own computation does not,
and is reported when the timeout expires. The report is sent on as an "abort", so every rank raises
a `PeerError` that names the same rank.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from samo.errors import PeerError, SamoError
from samo.pipeline.engine import Action, Engine, Message
from samo.pipeline.timeline import Event, Pass
from samo.pipeline.transport.base import Arrival, Transport, collective_error
from samo.pipeline.transport.wire import DATA_KINDS, Packet

__all__ = ["Batch", "Runner"]

Result = TypeVar("Result")

_ABORT_S: Final = 2.0
"""Seconds to send an "abort", or to wait for one after a collective has failed."""
_DRAIN_S: Final = 0.3
"""Seconds to wait for an "abort" that a neighbour sent before its link broke."""
_PATIENCE: Final = 3
"""Timeouts after which a neighbour that answers probes, and sends nothing else, is given up."""


@dataclass(frozen=True)
class Batch:
    """One stage's part of a batch.

    Attributes:
        num_micro_batches: Number of micro-batches.
        inputs: On the first stage, the tensors of each micro-batch.
        loss: On the last stage, the weighted loss of a micro-batch, by its number and outputs.
        is_training: Whether to run backward; otherwise gradients are empty, and only say that a
            micro-batch is done.
        scale: On the last stage, scales a loss before backward.
    """

    num_micro_batches: int
    inputs: list[tuple[Tensor, ...]] | None = None
    loss: Callable[[int, Any], Tensor] | None = None
    is_training: bool = True
    scale: Callable[[Tensor], Tensor] | None = None


@dataclass
class _Held:
    """Tensors of the micro-batches in flight."""

    inputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    gradients: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    loss: Tensor | None = None


class Runner:
    """Computes batches on one stage.

    Args:
        module: The layers of this stage.
        transport: The links to its neighbours.
        in_flight: Micro-batches this stage may hold.
        timeout_s: Seconds of silence after which a neighbour is given up.
    """

    def __init__(
        self, module: nn.Module, transport: Transport, *, in_flight: int, timeout_s: float
    ) -> None:
        self.module: Final = module
        self.transport: Final = transport
        self.in_flight: Final = in_flight
        self.timeout_s: Final = timeout_s
        self.events: list[Event] = []
        self.steps = 0
        self.sent_bytes = self.received_bytes = 0
        self._failure: str | None = None
        self._open: set[int] = set()  # neighbours whose "end" has not come

    def run(self, prepare: Callable[[], Batch]) -> Tensor:
        """Compute a batch and return its loss. If ``prepare`` raises, the other stages are told.

        Raises:
            PeerError: Another stage died, hung, failed or sent something invalid.
        """
        self.events = []

        def compute() -> Tensor:
            batch = prepare()
            stage, num_stages = self.transport.stage, self.transport.num_stages
            engine = Engine(stage, num_stages, batch.num_micro_batches, self.in_flight)
            self.transport.begin()
            return self._loop(engine, batch)

        loss = self._until_all_end(compute)
        self.steps += 1
        return loss

    def run_collective(self, do: Callable[[], Result]) -> Result:
        """Run something that all stages do together outside of a batch.

        Raises:
            PeerError: Another stage failed, or did not join.
        """

        def listen() -> Result:
            self.transport.begin()
            try:
                return do()
            except (SamoError, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                if self.transport.neighbours:
                    self._listen(min(_ABORT_S, self.timeout_s))
                raise collective_error(error) from error

        return self._until_all_end(listen)

    def _until_all_end(self, do: Callable[[], Result]) -> Result:
        if self._failure is not None:
            raise PeerError(f"the pipeline failed earlier ({self._failure}); start the ranks again")
        neighbours = self.transport.neighbours
        self._open = set(neighbours)
        try:
            result = do()
            for stage in neighbours:
                self.transport.send(stage, Packet("end", self.steps))
            late = self.transport.flush(self.timeout_s, neighbours)
            if late is not None:
                error = self._drain(late)
                waited = f"did not take what was sent to it for {self.timeout_s:g} s"
                said = waited if error is None else _describe(error)
                self._fail(late, said, skip=late, is_timeout=error is None)
            self._await_ends()
        except PeerError as error:
            self._failure = self._failure or str(error)
            raise
        except BaseException as error:
            if neighbours:  # a pipeline of one stage can run the next batch
                self._failure = f"{type(error).__name__}: {error}"
                self._broadcast_abort(self.transport.stage, self._failure, neighbours)
            raise
        return result

    def _loop(self, engine: Engine, batch: Batch) -> Tensor:
        held = _Held()
        if batch.inputs is not None:
            held.inputs = dict(enumerate(batch.inputs))
        while (action := engine.next()).kind != "step":
            if action.kind == "receive":
                self._receive(engine, held, batch)
            elif action.kind == "forward" or action.kind == "backward":
                self._compute(action.kind, action.micro_batch, held, batch)
            else:
                self._send(action, held, batch)
        assert held.loss is not None, "the engine ends when the loss is known"
        return held.loss

    # Passes

    def _compute(self, what: Pass, micro_batch: int, held: _Held, batch: Batch) -> None:
        start = time.perf_counter()
        with torch.set_grad_enabled(batch.is_training), record_function(f"samo/{what}"):
            if what == "forward":
                self._forward(micro_batch, held, batch)
            else:
                self._backward(micro_batch, held, batch)
        end = time.perf_counter()
        self.events.append(Event(start, end, self.transport.stage, what, micro_batch))

    def _forward(self, micro_batch: int, held: _Held, batch: Batch) -> None:
        output = self.module(*map(non_leaf, held.inputs[micro_batch]))
        if batch.loss is None:
            held.outputs[micro_batch] = as_tuple(output)
            return
        loss = batch.loss(micro_batch, output)
        held.outputs[micro_batch] = (loss if batch.scale is None else batch.scale(loss),)
        held.loss = loss.detach() if held.loss is None else held.loss + loss.detach()

    def _backward(self, micro_batch: int, held: _Held, batch: Batch) -> None:
        inputs, outputs = held.inputs.pop(micro_batch), held.outputs.pop(micro_batch)
        gradients = held.gradients.pop(micro_batch, ())
        if not batch.is_training:
            held.gradients[micro_batch] = ()
            return
        roots = [output for output in outputs if output.requires_grad]
        if batch.loss is None and len(roots) != len(gradients):
            what = f"sent {len(gradients)} gradients for {len(roots)} outputs of {micro_batch}"
            self._fail(self.transport.stage + 1, what)
        if roots:
            torch.autograd.backward(roots, gradients if batch.loss is None else None)
        held.gradients[micro_batch] = tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in inputs
            if tensor.requires_grad
        )

    # Packets

    def _send(self, action: Action, held: _Held, batch: Batch) -> None:
        stage, micro_batch = self.transport.stage, action.micro_batch
        flags: tuple[bool, ...] = ()
        if action.kind == "send_activation":
            kind, target = "activation", stage + 1
            outputs = held.outputs[micro_batch]
            tensors = tuple(output.detach() for output in outputs)
            flags = tuple(output.requires_grad for output in outputs)
        elif action.kind == "send_gradient":
            kind, target, tensors = "gradient", stage - 1, held.gradients.pop(micro_batch)
        else:
            assert held.loss is not None, "the engine sends the loss when it is known"
            kind, target, tensors = "loss", stage - 1, (held.loss,)
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        packet = Packet(
            kind,  # type: ignore[arg-type]
            self.steps,
            micro_batch,
            tensors,
            flags,
            is_training=batch.is_training,
        )
        self.transport.send(target, packet)

    def _receive(self, engine: Engine, held: _Held, batch: Batch) -> None:
        sender, packet = self._wait(engine)
        self.received_bytes += sum(tensor.nbytes for tensor in packet.tensors)
        if packet.step != self.steps:
            self._fail(sender, f"sent {packet.kind} of batch {packet.step} in batch {self.steps}")
        if packet.is_training != batch.is_training:
            calls = ("eval()", "step()")
            theirs, ours = calls[packet.is_training], calls[batch.is_training]
            self._fail(sender, f"called {theirs} where this stage called {ours}")
        if (sender < self.transport.stage) != (packet.kind == "activation"):
            self._fail(sender, f"sent {packet.kind} in the wrong direction")
        try:
            engine.receive(Message(packet.kind, packet.micro_batch))  # type: ignore[arg-type]
        except PeerError as error:
            self._fail(sender, str(error))
        if packet.kind == "activation":
            held.inputs[packet.micro_batch] = tuple(
                tensor.requires_grad_(flag)
                for tensor, flag in zip(packet.tensors, packet.needs_grad, strict=True)
            )
        elif packet.kind == "gradient":
            held.gradients[packet.micro_batch] = packet.tensors
        else:
            held.loss = packet.tensors[0]

    def _wait(self, engine: Engine) -> tuple[int, Packet]:
        """Return the next data packet and its sender; meanwhile answer probes and watch the clock."""
        begin = time.monotonic()
        heard = dict.fromkeys(self.transport.neighbours, begin)
        probed: set[int] = set()
        while True:
            now = time.monotonic()
            for stage in engine.senders():
                silence = now - heard[stage]
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
            if arrival is None:
                continue
            packet = self._handle(arrival)
            if packet.kind in DATA_KINDS:
                return arrival.stage, packet
            heard[arrival.stage] = time.monotonic()
            probed.discard(arrival.stage)

    def _await_ends(self) -> None:
        """Wait until each neighbour has ended this batch.

        A rank that exits while its neighbour still waits for a message would take it down. A
        neighbour that has our "end" answers no probes, and may have as many passes to compute as
        are in flight.
        """
        begin = time.monotonic()
        limit = max(_PATIENCE, self.in_flight + 1) * self.timeout_s
        while self._open:
            arrival = self.transport.receive(max(0.01, self.timeout_s / 8))
            if arrival is not None and self._handle(arrival).kind in DATA_KINDS:
                self._fail(arrival.stage, "sent more than belongs to the batch")
            waited = time.monotonic() - begin
            if arrival is None and waited > limit:
                stage = min(self._open)
                what = f"has not ended its batch for {waited:.1f} s"
                self._fail(stage, what, skip=stage, is_timeout=True)

    def _handle(self, arrival: Arrival) -> Packet:
        """Return a packet after answering a probe; raise if it is an "abort" or the link is broken."""
        stage, packet, error = arrival.stage, arrival.packet, arrival.error
        self._raise_if_abort(arrival)
        if isinstance(error, PeerError):  # it is alive, and hears of it too
            self._fail(stage, str(error))
        if packet is None:
            assert error is not None, "an arrival has a packet or an error"
            self._drain(stage)
            is_timeout = isinstance(error, TimeoutError)
            self._fail(stage, _describe(error), skip=stage, is_timeout=is_timeout)
        if packet.kind == "end":
            self._open.discard(stage)
        if packet.kind == "probe" and packet.step == self.steps:
            self.transport.send(stage, Packet("alive", self.steps))
        return packet

    # Failures

    def _listen(self, seconds: float) -> None:
        """Raise a failure that a neighbour reports within some seconds, if any."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            arrival = self.transport.receive(left)
            if arrival is not None:
                self._handle(arrival)

    def _drain(self, stage: int) -> Exception | None:
        """Raise the "abort" that a neighbour sent before its link broke; else return the link's error.

        The sending thread may see the closed connection before the receiving one has read the
        "abort".
        """
        self.transport.begin()  # it may have ended this batch and failed in the next
        error: Exception | None = None
        deadline = time.monotonic() + _DRAIN_S
        while (left := deadline - time.monotonic()) > 0:
            arrival = self.transport.receive(left)
            if arrival is not None and arrival.stage == stage:
                self._raise_if_abort(arrival)
                error = error or arrival.error
        return error

    def _raise_if_abort(self, arrival: Arrival) -> None:
        packet = arrival.packet
        if packet is not None and packet.kind == "abort":
            self._fail(packet.origin, packet.reason, skip=arrival.stage)

    def _fail(
        self, origin: int, what: str, *, skip: int | None = None, is_timeout: bool = False
    ) -> NoReturn:
        """Report that ``origin`` failed to the neighbours other than ``skip``, and raise."""
        transport = self.transport
        what = what.removeprefix(f"stage {origin} ")
        self._broadcast_abort(origin, what, [s for s in transport.neighbours if s != skip])
        is_known = 0 <= origin < transport.num_stages
        rank = transport.ranks[origin] if is_known else None
        raise PeerError(
            f"rank {rank} (stage {origin} of {transport.num_stages}) {what}. This is stage "
            f"{transport.stage}; its batch is lost: start the ranks again from the last checkpoint",
            rank=rank,
            stage=origin,
            is_timeout=is_timeout,
        )

    def _broadcast_abort(self, origin: int, what: str, stages: Iterable[int]) -> None:
        for stage in stages:
            self.transport.send(stage, Packet("abort", self.steps, origin=origin, reason=what))
        self.transport.flush(min(_ABORT_S, self.timeout_s), stages)


def _describe(error: Exception) -> str:
    what = "did not answer" if isinstance(error, TimeoutError) else "is gone"
    return f"{what} ({error})"


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """Return a stage's output as a tuple of tensors.

    Raises:
        TypeError: It is something else.
    """
    outputs = (output,) if isinstance(output, Tensor) else output
    if not isinstance(outputs, tuple | list) or not all(isinstance(t, Tensor) for t in outputs):
        kinds = [type(o).__name__ for o in outputs] if isinstance(outputs, tuple) else ""
        raise TypeError(
            f"a layer at the end of a stage must return a tensor or a tuple of tensors, got "
            f"{type(output).__name__} {kinds or ''}; wrap the layer, or cut elsewhere"
        )
    return tuple(outputs)


def non_leaf(tensor: Tensor) -> Tensor:
    """Return a received tensor as a non-leaf, so that a layer may change it in place."""
    is_inside = tensor.requires_grad and torch.is_grad_enabled()
    return _Alias.apply(tensor) if is_inside else tensor  # type: ignore[no-untyped-call]


class _Alias(torch.autograd.Function):
    """The identity. Its output shares memory with the leaf, hidden from autograd: no view, no copy."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
