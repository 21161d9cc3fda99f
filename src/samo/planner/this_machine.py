"""This machine as `Hardware`: its GPU by name, or its CPU."""

import os
from dataclasses import replace

import torch

from samo.planner.hardware import PROCESS_BYTES, Cluster, Hardware, Link, match_hardware
from samo.utils.environment import hardware


def this_cluster(device: str, ranks: int) -> Cluster:
    """Return the ranks that a launcher has started here and on other machines, all alike."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    hardware = replace(this_hardware(device, local), gpus_per_node=local)
    return Cluster(hardware=hardware, num_gpus=ranks)


def this_hardware(device: str = "auto", ranks: int = 1) -> Hardware:
    """Return the hardware of one rank of this machine.

    Memory is what the device reports. The rates of a GPU are those of the table of
    `samo.planner.hardware`; those of a CPU are rough, and `samo plan --measure` times them.

    Args:
        device: "cpu", "cuda", or "auto": a GPU if there is one.
        ranks: Ranks of this machine, which share its memory, or its GPUs if there are fewer.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    about = hardware(torch.device(device))
    memory = float(about["memory_bytes"])
    if device == "cuda":
        share = -(-ranks // torch.cuda.device_count())
        return match_hardware(about["device_name"], memory / share)
    cores = about["cores"] or 1
    return Hardware(
        name="cpu",
        memory_bytes=memory / ranks,
        flops=cores * 3e10 / ranks,
        bandwidth=2e10 / ranks,
        gpus_per_node=ranks,
        intra=Link(bandwidth=1e9, latency_s=1e-4),
        inter=Link(bandwidth=0.125e9, latency_s=2e-4),
        overlap=0.0,
        reserved_bytes=min(PROCESS_BYTES, memory / ranks / 2),
        dtype="float32",
        source=f"{about['device_name']}, {cores} cores; rates assumed: time it with --measure",
    )
