"""Pipelines over the axis `pipe`: a rank holds some layers and computes whatever message comes first.

- engine, timeline: decide and record; no torch, no I/O
- wire, transport: what is sent, and what a network has to offer
- gloo, nccl: networks
- layers, partition: what a model is cut into, and where
- stage, filling: the layers of a rank, and how they come to their values
- batches, tied: micro-batches and their weights in the loss; weights that two stages use
- gradients: the mean over replicas, and one verdict of all stages on what is not finite
- runner: does what the engine decides
- schedules: orders that torch.distributed.pipelining runs
- checking: what is refused; setup: settings, carried out; api: `samo.Pipeline`
"""

__all__ = []
