"""Pipelines over the axis `pipe`: a rank holds some layers and computes whatever message comes first.

engine, timeline          decide and record; no torch, no I/O
simulator                 a network with seeded delays in virtual time
wire, transport           what is sent, and what a network has to offer
memory, gloo, nccl        networks
partition, layers, stage  which layers a rank holds, and how it comes to them
runner                    does what the engine decides
api                       `samo.Pipeline`
"""

__all__ = []
