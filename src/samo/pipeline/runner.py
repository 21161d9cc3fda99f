"""Run the stages of one rank: compute what the engine decides, and send the results on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as record_function

from samo.pipeline.engine import Engine, MessageKind, Progress
from samo.pipeline.peers import Peers
from samo.pipeline.timeline import Event
from samo.pipeline.transport.wire import Packet


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
    seed: int | None = None  # of what layers draw for the first micro-batch; stage 0's counts


@dataclass
class _Held:
    """A micro-batch on a stage, until its backward pass."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()
    gradients: tuple[Tensor, ...] = ()


@dataclass
class _Run:
    """A batch that is being computed."""

    batch: Batch
    engine: Engine
    seed: int | None
    held: dict[tuple[int, int], _Held] = field(default_factory=dict)  # by stage and micro-batch
    loss: Tensor | None = None

    def is_end(self, kind: str, micro_batch: int) -> bool:
        """Whether a message is the last of its link, a gradient that brings the loss along."""
        return kind == "gradient" and micro_batch == self.batch.num_micro_batches - 1


class Runner:
    """Computes batches on one rank: the layers and limits are those of each of its stages."""

    def __init__(
        self,
        layers: Sequence[Callable[..., Any]],
        peers: Peers,
        in_flight: Sequence[int],
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.steps = 0
        self.sent_bytes = 0
        self._peers: Final = peers
        self._transport: Final = peers.transport
        self._num_places: Final = len(peers.transport.ranks)
        self._num_stages: Final = self._num_places * len(layers)
        numbers = range(peers.transport.place, self._num_stages, self._num_places)
        self._layers: Final = dict(zip(numbers, layers))
        self._limits: Final = dict(zip(numbers, in_flight))
        self._wire_dtype: Final = wire_dtype
        self._early: list[tuple[int, Packet]] = []  # data of the next batch

    def run(self, prepare: Callable[[], Batch]) -> Tensor:
        """Compute a batch and return its loss. If ``prepare`` raises, the other ranks are told."""
        self.events = []
        with self._peers.reporting():
            loss = self._compute(prepare())
        self.steps += 1
        return loss

    def _compute(self, batch: Batch) -> Tensor:
        count = batch.num_micro_batches
        run = _Run(
            batch,
            Engine(Progress(s, self._num_stages, count, own) for s, own in self._limits.items()),
            batch.seed,
        )
        for number, inputs in enumerate(batch.inputs or ()):
            run.held[0, number] = _Held(inputs)
        arrivals, self._early = [*self._early, *self._peers.poll()], []
        with torch.set_grad_enabled(batch.is_training):
            while True:
                for place, packet in arrivals:  # decide by everything that has come
                    self._take(run, place, packet)
                kind, micro_batch, stage = run.engine.next()
                if kind == "step":
                    break
                if kind == "receive":
                    arrivals = self._peers.receive(self._due(run))
                else:
                    self._pass(run, kind, stage, micro_batch)
                    arrivals = self._peers.poll()
        assert run.loss is not None, "the last gradient brings the loss along"
        return run.loss

    def _pass(
        self, run: _Run, kind: Literal["forward", "backward"], stage: int, micro_batch: int
    ) -> None:
        """Compute a pass, and send its result to the stage that needs it."""
        start = time.perf_counter()
        with record_function(f"samo/{kind}"):
            compute = self._forward if kind == "forward" else self._backward
            tensors = compute(run, stage, micro_batch)
        self.events.append(Event(start, time.perf_counter(), stage, kind, micro_batch))
        if kind == "forward" and stage < self._num_stages - 1:
            self._send(run, "activation", stage + 1, micro_batch, tensors)
        elif kind == "backward" and stage > 0:
            self._send(run, "gradient", stage - 1, micro_batch, tensors)

    def _forward(self, run: _Run, stage: int, micro_batch: int) -> tuple[Tensor, ...]:
        held, batch = run.held[stage, micro_batch], run.batch
        settings = {} if run.seed is None else {"seed": run.seed + micro_batch}
        output = self._layers[stage](*map(non_leaf, held.inputs), **settings)
        if stage < self._num_stages - 1:
            held.outputs = as_tuple(output)
        else:
            assert batch.loss is not None, "the rank of the last stage has the loss"
            loss = batch.loss(micro_batch, output)
            held.outputs = (loss if batch.scale is None else batch.scale(loss),)
            run.loss = loss.detach() if run.loss is None else run.loss + loss.detach()
        return held.outputs

    def _backward(self, run: _Run, stage: int, micro_batch: int) -> tuple[Tensor, ...]:
        held = run.held.pop((stage, micro_batch))
        roots = [output for output in held.outputs if output.requires_grad]
        if roots:
            torch.autograd.backward(roots, held.gradients or None)
        return tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in held.inputs
            if tensor.requires_grad and stage > 0  # the caller's have theirs in x.grad
        )

    def _send(
        self,
        run: _Run,
        kind: MessageKind,
        target: int,
        micro_batch: int,
        tensors: tuple[Tensor, ...],
    ) -> None:
        if run.is_end(kind, micro_batch):
            assert run.loss is not None
            tensors = (*tensors, run.loss)
        values = tuple(tensor.detach() for tensor in tensors)
        is_narrow: tuple[bool, ...] = ()
        if self._wire_dtype is not None:  # a scalar, such as the loss, stays as it is
            is_narrow = tuple(t.dtype == torch.float32 and t.dim() > 0 for t in values)
            values = tuple(
                t.to(self._wire_dtype) if flag else t for t, flag in zip(values, is_narrow)
            )
        self.sent_bytes += sum(tensor.nbytes for tensor in values)
        packet = Packet(
            kind,
            self.steps,
            micro_batch,
            target,
            values,
            tuple(tensor.requires_grad for tensor in tensors),
            is_narrow,
            is_training=run.batch.is_training,
            seed=run.seed,
        )
        self._transport.send(self._place(target), packet)

    def _take(self, run: _Run, place: int, packet: Packet) -> None:
        """Take data that has come, and check that it was due."""
        kind: MessageKind = "activation" if packet.kind == "activation" else "gradient"
        if packet.step == self.steps + 1 and place not in self._due(run):
            self._early.append((place, packet))  # it has ended this batch, as this rank soon does
            return
        fail, stage, micro_batch = self._peers.fail, packet.stage, packet.micro_batch
        if packet.step != self.steps:
            fail(place, f"sent {kind} of batch {packet.step} in batch {self.steps}")
        if packet.is_training != run.batch.is_training:
            ours, theirs = ("step", "eval") if run.batch.is_training else ("eval", "step")
            fail(place, f"called {theirs}() where this rank called {ours}()")
        source = stage + (-1 if kind == "activation" else 1)
        if stage not in self._layers or place != self._place(source):
            fail(place, f"sent {kind} for stage {stage}, which is not on this rank")
        try:
            run.engine.stages[stage].receive(kind, micro_batch)
        except ValueError as error:
            fail(place, str(error))
        tensors = packet.tensors
        if any(packet.is_narrow):
            tensors = tuple(
                tensor.float() if flag else tensor
                for tensor, flag in zip(tensors, packet.is_narrow)
            )
        if kind == "activation":
            for tensor, flag in zip(tensors, packet.needs_grad, strict=True):
                tensor.requires_grad_(flag)
            run.held[stage, micro_batch], run.seed = _Held(tensors), packet.seed
            return
        held, is_end = run.held[stage, micro_batch], run.is_end(kind, micro_batch)
        num_due = sum(output.requires_grad for output in held.outputs) + is_end
        if len(tensors) != num_due:
            what = f"sent {len(tensors)} tensors with gradient {micro_batch}, where {num_due} "
            fail(place, f"{what}were due")
        held.gradients = tensors[: num_due - is_end]
        if is_end:
            run.loss = tensors[-1].clone()  # which the caller may keep, without the gradients

    def _due(self, run: _Run) -> set[int]:
        """Return the neighbours that have more to send in this batch."""
        return {self._place(stage) for stage in run.engine.senders()}

    def _place(self, stage: int) -> int:
        """Return the place of the rank that has a stage."""
        return stage % self._num_places


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
    """The identity. Its output shares memory with the leaf, without autograd seeing a view.

    The leaf's gradient keeps its strides, which decide in which order a kernel adds up: autograd
    would give it those of the leaf.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.tensor = tensor
        return tensor.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        if not ctx.tensor.is_leaf:  # an input of the caller's
            return grad
        ctx.tensor.grad = grad
        return None
