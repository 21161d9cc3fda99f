"""Pipelines over the axis `pipe`: a rank holds some layers and computes whichever message comes first.

- pipeline: `samo.Pipeline`; gradients, tied: what stages reduce after a batch
- split, stage, microbatch: how a model and a batch are cut
- engine, timeline: decide and record; no torch, no I/O
- runner: does what the engine decides, over a transport; torch_schedules: torch's own schedules
"""

__all__ = []
