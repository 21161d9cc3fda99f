"""What a pipeline is not given: settings and batches that it refuses."""

from torch import Tensor

from samo.pipeline.schedules import check_schedule

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
