"""How messages travel between stages: the interface, gloo, NCCL, and the bytes."""

__all__ = []
