"""What ranks need besides torch.distributed.

mesh      the ranks as a DeviceMesh with axes `pipe` and `data`
watchdog  heartbeats: which rank failed, and an end for those that wait for it
"""

__all__ = []
