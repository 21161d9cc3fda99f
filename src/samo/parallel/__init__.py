"""Training on many ranks: the mesh, and replicas that send only what is kept.

mesh         the grid of ranks, a DeviceMesh with axes `pipe` and `data`
layout       which weight lies in which bucket, and which rank owns what: arithmetic, no torch
traffic      what was sent and how long that took
peers        who is alive
collectives  the operations of torch.distributed that are used, counted and guarded
agreement    what must be the same on all ranks at the start
buckets      flat buffers of compressed gradients, and their reduction
dense        dense gradients and values, before a model is compressed
members      a weight's place in a bucket, and what it tells the others
team         when buckets are reduced, and what an optimizer's step does around it
replicas     the public functions
links        messages from rank to rank, for checkpoints
clipping     clipping by the norm over all ranks and stages
"""

__all__ = []
