"""Pipelines over the axis `pipe`: each rank has some layers, and computes what its messages allow.

- pipeline: `samo.Pipeline`; gradients, tied: what stages reduce after a batch
- split, partition, stage, microbatch: how a model and a batch are cut
- engine, timeline: decide and record; no torch, no I/O
- runner: computes what the engine decides; peers: hears from other ranks, and names one that fails
- transport: how packets travel
"""
