"""What ranks need beside torch.distributed: a grid, names for ranks that fail, and messages.

mesh   the grid of ranks, a DeviceMesh with axes `pipe` and `data`
peers  who is alive
watch  the last resort against a hang
links  messages from rank to rank, for checkpoints
"""

__all__ = []
