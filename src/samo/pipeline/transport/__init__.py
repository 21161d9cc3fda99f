"""How packets travel between stages: the interface, bytes on the wire, TCP, GPUs and NCCL."""

__all__ = []
