"""What a pipeline is not given: settings, batches and masks that it refuses."""

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samo.core.compress import masks as masks_of
from samo.core.ranks import compare_masks
from samo.errors import MaskError
from samo.pipeline.tied import Tie
from samo.pipeline.torch_schedules import check_schedule

__all__ = []


def check_settings(
    schedule: str,
    micro_batches: int,
    in_flight: object,
    stages_per_rank: int | None,
    reduction: str,
    timeout_s: float,
) -> None:
    """Refuse settings of a pipeline that cannot be meant.

    Raises:
        ValueError: One is out of range, or has no effect on the schedule.
    """
    check_schedule(schedule)
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be a whole number, 1 or more, got {micro_batches!r}")
    if in_flight is not None and schedule != "message-driven":
        raise ValueError(
            f"in_flight={in_flight} has no effect on schedule '{schedule}', whose order fixes it; leave "
            "it out, or use 'message-driven'"
        )
    if stages_per_rank is not None and (schedule != "interleaved" or stages_per_rank < 2):
        raise ValueError(
            f"stages_per_rank={stages_per_rank} with schedule '{schedule}': only 'interleaved' has "
            "several pieces on a rank, 2 or more"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {reduction!r}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be more than 0 seconds, got {timeout_s}")


def check_even(inputs: tuple[Tensor, ...], micro_batches: int, schedule: str) -> None:
    """Refuse a batch that one of torch's schedules cannot cut.

    Raises:
        ValueError: Its rows do not make up equal micro-batches.
    """
    rows = len(inputs[0]) if inputs else 0
    if rows % micro_batches:
        raise ValueError(
            f"{rows} rows cannot be cut into {micro_batches} equal micro-batches, and torch's schedule "
            f"'{schedule}' takes no smaller ones; use 'message-driven', or drop the rest of the batch"
        )


def check_replicas(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Compare the masks of replicas; before each reduction, since any rank may have other ones.

    Args:
        module: This stage.
        group: Its replicas, on the host.

    Raises:
        MaskError: They differ; on all replicas.
    """
    masks = masks_of(module)
    digest = hashlib.sha256("".join(masks[name].fingerprint() for name in sorted(masks)).encode())
    if differing([float(int(digest.hexdigest()[:12], 16))], group):
        compare_masks(masks, group)


def check_ties(ties: Sequence[Tie], module: nn.Module, group: dist.ProcessGroup) -> None:
    """Compare the masks of tied weights, before each sum.

    Args:
        ties: Those of all stages.
        module: This stage.
        group: All stages, on the host.

    Raises:
        MaskError: They differ; on all stages.
    """
    for place in differing([tie.mask_print(module) for tie in ties], group):
        raise MaskError(
            f"tied weight '{ties[place].names[0]}' has different masks on stages {ties[place].ranks}; "
            f"give all its names {ties[place].names} the same mask, or none"
        )


def differing(numbers: Sequence[float | None], group: dist.ProcessGroup) -> list[int]:
    """Return the places of those numbers that ranks have different ones for; None goes with any."""
    ends = [(-math.inf, -math.inf) if n is None else (n, -n) for n in numbers]
    largest = torch.tensor(ends, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return [place for place, (high, low) in enumerate(largest.tolist()) if high != -low]
