"""How packets travel between stages: the interface, the header, gloo and NCCL."""

__all__ = []
