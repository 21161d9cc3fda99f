"""Pipelines over the axis `pipe`: each rank has some layers, and computes what its messages allow.

- pipeline: `samo.Pipeline`; gradients, tied: what stages reduce after a batch
- split, partition, stage, microbatch: how a model and a batch are cut
- engine, timeline: decide and record; no torch, no I/O
- runner: does what the engine decides, over a transport
"""

__all__ = []
