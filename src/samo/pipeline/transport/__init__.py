"""How packets travel between stages: bytes on the wire, TCP, NCCL, and how ranks meet."""
