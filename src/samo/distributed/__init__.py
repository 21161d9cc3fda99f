"""What ranks need besides torch.distributed.

mesh      the ranks as a DeviceMesh with axes `pipe` and `data`
ranks     do something as one: what fails on any rank is raised on all
store     keys that all ranks find, and answers that are not waited for
watchdog  heartbeats: which rank failed, and an end for those that wait for it
"""
