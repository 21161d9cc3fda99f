"""What would fit, if a job does not: other settings, more GPUs, or larger ones."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from samo.memory.predict import Scheme
from samo.planner.hardware import HARDWARE, Cluster
from samo.planner.memory import Job, peak
from samo.planner.network import ENDS, PRUNED
from samo.planner.search import layouts

SEQUENCES: Final = 8
"""Of a step, for each GPU, unless a batch is given."""

_MOST_GPUS: Final = 4096
_HIGHEST: Final = 0.98  # sparsity that is suggested


def fits(job: Job, cluster: Cluster, scheme: Scheme = "samo") -> bool:
    """Return whether any layout of a scheme fits."""
    return any(
        peak(job, layout).needed_bytes <= cluster.hardware.usable_bytes
        for layout in layouts(job, cluster, scheme)
        # One pass does not accumulate gradients; one sequence has the fewest activations.
        if layout.checkpointing and (layout.micro_batch == 1 or layout.micro_batches(job) == 1)
    )


def fewest_gpus(job: Job, cluster: Cluster, scheme: Scheme = "samo") -> int | None:
    """Return the smallest power of two of GPUs on which a scheme fits."""
    count = 1
    while count <= _MOST_GPUS:
        large = replace(job, batch=max(job.batch, count))
        if fits(large, replace(cluster, num_gpus=count), scheme):
            return count
        count *= 2
    return None


def what_would_fit(
    job: Job, cluster: Cluster, taken: int, rules: Mapping[str, float]
) -> Iterator[str]:
    """Yield flags to add with which a job would fit, first on the GPUs at hand.

    A teacher has taken some of their memory, and rules set the sparsity of some kinds.
    """
    hardware, gpus, network = cluster.hardware, cluster.num_gpus, job.network
    changes: list[tuple[str, Job]] = [("", job)]
    is_pruned = any(network.sparsity.get(kind) for kind in ENDS)
    if not (network.command or network.frozen or is_pruned):
        frozen, flag = replace(job, network=network.with_frozen(ENDS)), "--freeze-embeddings"
        if fits(frozen, cluster):
            yield f"frozen embeddings: {flag}"
        else:
            changes.append((f" {flag}", frozen))
    free = replace(hardware, reserved_bytes=hardware.reserved_bytes - taken)
    for flag, changed in changes if taken else []:
        if fits(changed, replace(cluster, hardware=free)):
            yield f"no teacher:{flag} without --teacher"
            break
    for flag, changed in changes:
        if less := next((x for x in _smaller(changed, gpus) if fits(x[1], cluster)), None):
            yield f"fewer tokens at a time: {less[0]}{flag}"
            break
    for flag, changed in changes:
        if sparsity := _lowest_sparsity(changed, cluster, rules):
            yield f"pruning more: --sparsity {sparsity:g}{flag}"
    is_cpu = job.dtype == "float32"  # whose ranks share one memory
    if not is_cpu and (enough := fewest_gpus(job, cluster)) is not None:
        batch = max(job.batch, enough)
        usual = replace(job, batch=SEQUENCES * enough)
        is_any = batch == job.batch and fits(usual, replace(cluster, num_gpus=enough))
        flag = "" if is_any else f" --batch {batch}"  # otherwise it may grow with the GPUs
        yield f"{enough} x {hardware.name}: --gpus {enough}{flag}"
    larger = (one for one in HARDWARE.values() if one.memory_bytes > hardware.memory_bytes)
    for other in sorted(larger, key=lambda one: one.memory_bytes):
        reserved = other.reserved_bytes + taken
        there = replace(cluster, hardware=replace(other, reserved_bytes=reserved))
        if fits(replace(job, dtype=other.dtype), there):
            yield f"{gpus} x {other.name}: --gpu {other.name}"
            break


def _smaller(job: Job, gpus: int) -> Iterator[tuple[str, Job]]:
    """Yield flags and jobs of smaller batches and shorter sequences."""
    contexts = [
        job.context >> halvings for halvings in range(1, 8) if job.context >> halvings >= 512
    ]
    for batch, flag in ((job.batch, ""), (gpus, f"--batch {gpus} ")):
        if flag:
            yield flag.rstrip(), replace(job, batch=batch)
        for context in contexts:
            yield f"{flag}--context {context}", replace(job, batch=batch, context=context)


def _lowest_sparsity(job: Job, cluster: Cluster, rules: Mapping[str, float]) -> float | None:
    """Return the lowest sparsity, in steps of 0.01, above that of all kinds without a rule."""
    free = [value for kind, value in job.network.sparsity.items() if kind in PRUNED - rules.keys()]
    # Nothing is suggested for a network that is not pruned, or by rules alone.
    today = max(free, default=0.0) or 1.0
    for hundredths in range(math.ceil(100 * today), round(100 * _HIGHEST) + 1):
        if fits(replace(job, network=job.network.pruned(hundredths / 100, rules)), cluster):
            return hundredths / 100
    return None
