"""Do what the engine decides: compute passes, send what comes out, name whoever fails.

A stage that waits half of the timeout asks the silent neighbour whether it is there. One that waits
itself answers at once; one that is dead, stopped or lost in its own computation does not, and is blamed
when the timeout is over. Whoever blames a stage tells the other side, which passes it on: everyone ends
with the name of the same rank.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from samo.errors import PeerError, SamoError, first_words
from samo.pipeline.engine import Action, Engine, Message
from samo.pipeline.timeline import Event, Pass
from samo.pipeline.transport.base import Arrival, Transport, not_come
from samo.pipeline.transport.wire import DATA_KINDS, Packet, PacketKind

__all__ = ["Batch", "Runner"]

Result = TypeVar("Result")

_GOODBYE: Final = 2.0
_PATIENCE: Final = 3
_LAST_WORDS_S: Final = 0.3
"""Seconds in which what a neighbour sent before it left may still come."""


@dataclass(frozen=True)
class Batch:
    """What one stage knows of a batch.

    Attributes:
        num_micro_batches: Micro-batches.
        inputs: On the first stage, the tensors of each micro-batch.
        loss: On the last stage, the weighted loss of a micro-batch, by its number and outputs.
        is_training: Whether to go backward; otherwise gradients are empty, and only say that a
            micro-batch is done.
        scale: On the last stage, makes of a loss what goes backward.
    """

    num_micro_batches: int
    inputs: list[tuple[Tensor, ...]] | None = None
    loss: Callable[[int, Any], Tensor] | None = None
    is_training: bool = True
    scale: Callable[[Tensor], Tensor] | None = None


@dataclass
class _Held:
    """What is kept of the micro-batches that are here."""

    inputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    gradients: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    loss: Tensor | None = None


class Runner:
    """Computes batches on one stage.

    Args:
        module: The layers of this stage.
        transport: The links to its neighbours.
        in_flight: Limit of this stage.
        timeout_s: Seconds of silence after which a neighbour is given up.
    """

    def __init__(
        self,
        module: nn.Module,
        transport: Transport,
        *,
        in_flight: int,
        timeout_s: float,
    ) -> None:
        self.module: Final = module
        self.transport: Final = transport
        self.in_flight: Final = in_flight
        self.timeout_s: Final = timeout_s
        self.events: list[Event] = []
        self.steps = 0
        self.sent_bytes = self.received_bytes = 0
        self._failure: str | None = None
        self._heard: dict[int, float] = {}
        self._asked: set[int] = set()
        self._expected: dict[int, int] = {}
        self._early: list[Arrival] = []
        self._open: set[int] = set()  # neighbours whose "end" has not come

    def run(self, prepare: Callable[[], Batch]) -> Tensor:
        """Compute a batch and return its loss; the other stages hear of it if ``prepare`` raises.

        Raises:
            PeerError: Another stage died, hung, failed or sent nonsense.
        """
        transport, stage = self.transport, self.transport.stage
        self.events = []

        def compute() -> Tensor:
            batch = prepare()
            engine = Engine(stage, transport.num_stages, batch.num_micro_batches, self.in_flight)
            before, after = engine.expected()
            wanted = {stage - 1: before, stage + 1: after}
            self._expected = {s: n for s, n in wanted.items() if n}
            transport.begin()
            return self._loop(engine, batch)

        loss = self._until_all_end(compute)
        self.steps += 1
        return loss

    def together(self, do: Callable[[], Result]) -> Result:
        """Do what needs other stages outside of a batch, and name whoever does not come to it.

        Raises:
            PeerError: Another stage did not.
        """

        def listen() -> Result:
            self.transport.begin()
            try:
                return do()
            except (SamoError, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                self._hear()
                raise not_come(error) from error

        return self._until_all_end(listen)

    def _until_all_end(self, do: Callable[[], Result]) -> Result:
        if self._failure is not None:
            raise PeerError(
                f"the pipeline ended with an earlier error ({self._failure}); start the ranks again"
            )
        self._open = self._neighbours()
        try:
            result = do()
            for other in self._neighbours():
                self.transport.send(other, Packet("end", self.steps))
            late = self.transport.flush(self.timeout_s, self._neighbours())
            if late is not None:
                self._blame(late, self._why(late))
            self._await_ends()
        except PeerError as error:
            self._failure = self._failure or str(error)
            raise
        except BaseException as error:
            if not self._neighbours():
                raise  # nobody else is in the middle of this batch
            self._failure = f"{type(error).__name__}: {error}"
            self._say_goodbye(self.transport.stage, self._failure, self._neighbours())
            raise
        return result

    def _hear(self) -> None:
        """Raise what a neighbour says about who failed, if it says anything."""
        deadline = time.monotonic() + min(_GOODBYE, self.timeout_s)
        while time.monotonic() < deadline:
            arrival = self._next(0.1)
            if arrival is not None:
                self._is_data(arrival)

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

    # Passes --------------------------------------------------------------------------------------

    def _compute(self, what: Pass, micro_batch: int, held: _Held, batch: Batch) -> None:
        start = time.perf_counter()
        with torch.set_grad_enabled(batch.is_training):
            if what == "forward":
                self._forward(micro_batch, held, batch)
            else:
                self._backward(micro_batch, held, batch)
        end = time.perf_counter()
        self.events.append(Event(start, end, self.transport.stage, what, micro_batch))

    def _forward(self, micro_batch: int, held: _Held, batch: Batch) -> None:
        inputs = held.inputs[micro_batch]
        output = self.module(*(enter(tensor) for tensor in inputs))
        if batch.loss is None:
            held.outputs[micro_batch] = as_tuple(output)
            return
        loss = batch.loss(micro_batch, output)
        held.outputs[micro_batch] = (loss if batch.scale is None else batch.scale(loss),)
        total = loss.detach()
        held.loss = total if held.loss is None else held.loss + total

    def _backward(self, micro_batch: int, held: _Held, batch: Batch) -> None:
        outputs = held.outputs.pop(micro_batch)
        inputs = held.inputs.pop(micro_batch)
        gradients = held.gradients.pop(micro_batch, ())
        if not batch.is_training:
            held.gradients[micro_batch] = ()
            return
        roots = [output for output in outputs if output.requires_grad]
        if batch.loss is None and len(roots) != len(gradients):
            what = f"sent {len(gradients)} gradients for {len(roots)} outputs of {micro_batch}"
            self._blame(self.transport.stage + 1, what, is_there=True)
        if roots:
            given: list[Any] = list(gradients) if batch.loss is None else [None]
            torch.autograd.backward(roots, given)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        held.gradients[micro_batch] = tuple(
            torch.zeros_like(t) if t.grad is None else t.grad for t in wanted
        )

    # Messages ------------------------------------------------------------------------------------

    def _send(self, action: Action, held: _Held, batch: Batch) -> None:
        stage, micro_batch = self.transport.stage, action.micro_batch
        if action.kind == "send_activation":
            outputs = held.outputs[micro_batch]
            flags = tuple(output.requires_grad for output in outputs)
            tensors = tuple(output.detach() for output in outputs)
            packet = Packet(
                "activation", self.steps, micro_batch, tensors, flags, is_training=batch.is_training
            )
            self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
            self.transport.send(stage + 1, packet)
            return
        if action.kind == "send_gradient":
            tensors = held.gradients.pop(micro_batch)
            flags = (False,) * len(tensors)
            kind: PacketKind = "gradient"
        else:
            assert held.loss is not None, "the engine sends the loss when it is known"
            kind, tensors, flags = "loss", (held.loss,), (False,)
        trains = batch.is_training
        packet = Packet(kind, self.steps, micro_batch, tensors, flags, is_training=trains)
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        self.transport.send(stage - 1, packet)

    def _receive(self, engine: Engine, held: _Held, batch: Batch) -> None:
        arrival = self._wait()
        packet = arrival.packet
        assert packet is not None, "errors end the wait with an exception"
        assert packet.kind in ("activation", "gradient", "loss"), "control ends in the wait"
        self.received_bytes += sum(tensor.nbytes for tensor in packet.tensors)
        if packet.step != self.steps:
            what = f"sent {packet.kind} of batch {packet.step} in batch {self.steps}"
            self._blame(arrival.stage, what, is_there=True)
        if packet.is_training != batch.is_training:
            what = "called {} where this stage called {}".format(
                *(("eval()", "step()")[flag] for flag in (packet.is_training, batch.is_training))
            )
            self._blame(arrival.stage, what, is_there=True)
        is_from_before = arrival.stage < self.transport.stage
        if is_from_before != (packet.kind == "activation"):
            what = f"sent {packet.kind} in the wrong direction"
            self._blame(arrival.stage, what, is_there=True)
        try:
            engine.receive(Message(packet.kind, packet.micro_batch))
        except PeerError as error:
            self._blame(arrival.stage, str(error), is_there=True)
        if packet.kind == "activation":
            held.inputs[packet.micro_batch] = tuple(
                tensor.requires_grad_(flag)
                for tensor, flag in zip(packet.tensors, packet.needs_grad)
            )
        elif packet.kind == "gradient":
            held.gradients[packet.micro_batch] = packet.tensors
        else:
            held.loss = packet.tensors[0]

    def _next(self, timeout_s: float) -> Arrival | None:
        """Return what came first of what belongs to now: what follows a stage's "end" is for later."""
        for place, early in enumerate(self._early):
            if early.stage in self._open:
                return self._early.pop(place)
        arrival = self.transport.receive(timeout_s)
        if arrival is None or arrival.packet is None or arrival.stage in self._open:
            return arrival
        self._early.append(arrival)
        return None

    def _wait(self) -> Arrival:
        """Return the next data packet; meanwhile answer questions and watch the clock."""
        begin = time.monotonic()
        self._heard = dict.fromkeys(self._expected, begin)
        self._asked.clear()
        while True:
            now = time.monotonic()
            for stage in [s for s, left in self._expected.items() if left]:
                silence = now - self._heard[stage]
                if silence >= self.timeout_s:
                    self._blame(stage, f"has been silent for {silence:.1f} s")
                if now - begin > _PATIENCE * self.timeout_s:
                    self._blame(stage, f"is there, but has sent nothing for {now - begin:.1f} s")
                if silence >= self.timeout_s / 2 and stage not in self._asked:
                    self._asked.add(stage)
                    self.transport.send(stage, Packet("probe", self.steps))
            arrival = self._next(max(0.01, self.timeout_s / 8))
            if arrival is not None and self._is_data(arrival):
                return arrival

    def _await_ends(self) -> None:
        """Wait until each neighbour has said that it is done.

        Then nobody receives any more, and a program may end here: a rank that goes while its neighbour
        still waits for a message takes it along. A neighbour that has our "end" hears no questions, and
        may have as many passes before it as are in flight.
        """
        begin = time.monotonic()
        limit = max(_PATIENCE, self.in_flight + 1) * self.timeout_s
        while self._open:
            arrival = self._next(max(0.01, self.timeout_s / 8))
            if arrival is not None and self._is_data(arrival):
                what = "sent more than belongs to the batch"
                self._blame(arrival.stage, what, is_there=True)
            waited = time.monotonic() - begin
            if arrival is None and waited > limit:
                self._blame(min(self._open), f"has not ended its batch for {waited:.1f} s")

    def _is_data(self, arrival: Arrival) -> bool:
        stage, packet = arrival.stage, arrival.packet
        if packet is None:
            is_there = isinstance(arrival.error, PeerError)  # it sends, if only nonsense
            if not is_there:
                self._hear_last_words(stage)
            self._blame(stage, _said(arrival.error), is_there=is_there)
        assert packet is not None
        self._heard[stage] = time.monotonic()
        self._asked.discard(stage)
        self._heed(arrival)
        if packet.kind == "end":
            self._open.discard(stage)
        if packet.kind == "probe" and packet.step == self.steps:
            self.transport.send(stage, Packet("alive", self.steps))
        if packet.kind not in DATA_KINDS:
            return False
        self._expected[stage] -= 1
        return True

    def _heed(self, arrival: Arrival) -> None:
        """Raise what a neighbour says about who failed, if that is what has come."""
        packet = arrival.packet
        if packet is not None and packet.kind == "abort":
            self._end(packet.origin, packet.reason, came_from=arrival.stage)

    def _hear_last_words(self, stage: int) -> str | None:
        """Raise what a neighbour said before it left; else return what its link has said.

        Who sends to it may see the closed connection before what it sent itself.
        """
        for early in self._early:
            if early.stage == stage:
                self._heed(early)
        said = None
        deadline = time.monotonic() + _LAST_WORDS_S
        while (left := deadline - time.monotonic()) > 0:
            arrival = self.transport.receive(left)
            if arrival is not None and arrival.stage == stage:
                self._heed(arrival)
                said = said or (None if arrival.error is None else _said(arrival.error))
        return said

    def _why(self, late: int) -> str:
        """Say why a neighbour did not take what was sent to it."""
        said = self._hear_last_words(late)
        return said or f"did not take what was sent to it for {self.timeout_s:g} s"

    def _blame(self, stage: int, what: str, *, is_there: bool = False) -> None:
        """End the batch; one that is there hears of it too, and tells those behind it."""
        self._end(stage, what, came_from=-1 if is_there else stage)

    def _end(self, origin: int, what: str, *, came_from: int) -> None:
        own = self.transport.stage
        what = what.removeprefix(f"stage {origin} ")
        self._say_goodbye(origin, what, self._neighbours() - {came_from})
        is_known = 0 <= origin < self.transport.num_stages
        rank = self.transport.ranks[origin] if is_known else -1
        raise PeerError(
            f"rank {rank} (stage {origin} of {self.transport.num_stages}) {what}. This is stage "
            f"{own}; its batch is lost: start the ranks again from the last checkpoint",
            ranks=(rank,),
            stage=origin,
        )

    def _say_goodbye(self, origin: int, what: str, stages: set[int]) -> None:
        for stage in sorted(stages):
            packet = Packet("abort", self.steps, origin=origin, reason=what)
            self.transport.send(stage, packet)
        self.transport.flush(min(_GOODBYE, self.timeout_s), stages)

    def _neighbours(self) -> set[int]:
        own = self.transport.stage
        return {stage for stage in (own - 1, own + 1) if 0 <= stage < self.transport.num_stages}


def _said(error: Exception | None) -> str:
    """Return what a stage did, by the error that its link ended with."""
    if error is None or isinstance(error, PeerError):
        return str(error)
    first = first_words(error)
    what = "did not take what was sent to it" if "imed out" in first else "is gone"
    return f"{what} ({first})"


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


def enter(tensor: Tensor) -> Tensor:
    """Return a received tensor as the inside of a graph, so that a layer may change it in place."""
    is_inside = tensor.requires_grad and torch.is_grad_enabled()
    return _Enter.apply(tensor) if is_inside else tensor  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """The identity. Its result shares memory with the leaf, which autograd need not know."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
