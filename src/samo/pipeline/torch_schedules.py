"""Schedules of fixed order, run by torch.distributed.pipelining.

torch's own division of gradients is off (it divides by the number of micro-batches, and twice where
gradients accumulate): the loss carries the weight of each micro-batch instead.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samo.errors import SamoError, nearest
from samo.pipeline.runner import Batch, Result
from samo.pipeline.transport.base import collective_error

__all__ = ["FIXED", "SCHEDULES", "TorchRunner", "check_schedule"]

FIXED: Final = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
}
SCHEDULES: Final = ("message-driven", *FIXED)
_LOSS_TYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_schedule(schedule: str) -> None:
    """Refuse a schedule that is not offered here.

    Raises:
        ValueError: It is not one of `SCHEDULES`.
    """
    if schedule not in SCHEDULES:
        raise ValueError(
            f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}"
            f"{nearest(str(schedule), SCHEDULES)}"
        )


class TorchRunner:
    """Computes batches in an order of torch's.

    Args:
        schedule: One of `FIXED`.
        pieces: This rank's pieces of the model with their numbers.
        num_pieces: Pieces of all ranks.
        group: Ranks in the order of the stages.
        device: This rank's device.
        num_micro_batches: Micro-batches of every batch.
    """

    def __init__(
        self,
        schedule: str,
        pieces: list[tuple[int, nn.Module]],
        num_pieces: int,
        group: dist.ProcessGroup,
        device: torch.device,
        num_micro_batches: int,
    ) -> None:
        from torch.distributed import pipelining  # takes seconds to load, and not everyone needs it

        self.num_micro_batches: Final = num_micro_batches
        self.group: Final = group
        self.device: Final = device
        self._last_rank: Final = dist.get_process_group_ranks(group)[
            (num_pieces - 1) % group.size()
        ]
        self._batch: Batch | None = None
        self._losses: Final[dict[int, Tensor]] = {}
        stages = [
            pipelining.PipelineStage(module, number, num_pieces, device, group=group)
            for number, module in pieces
        ]
        cls = getattr(pipelining, FIXED[schedule])
        self._schedule: Final = cls(
            stages if schedule == "interleaved" else stages[0],
            n_microbatches=num_micro_batches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self._is_first: Final = pieces[0][0] == 0
        self._is_last: Final = pieces[-1][0] == num_pieces - 1

    def run(self, batch: Batch, inputs: tuple[Tensor, ...]) -> Tensor:
        """Compute a batch and return its loss."""
        self._batch = batch
        arguments = inputs if self._is_first else ()
        # torch also asks for a loss to find out shapes: its number, not its turn, tells which one.
        numbers = torch.arange(self.num_micro_batches)
        wanted: dict[str, Any] = {"target": numbers} if self._is_last else {}
        compute = self._schedule.step if batch.is_training else self._schedule.eval
        with nullcontext() if batch.is_training else torch.no_grad():
            compute(*arguments, **wanted)
        # Its value, which float64 holds exactly, and its type, which the other ranks cannot know.
        told = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self._is_last:
            total = self._losses[0]
            for number in range(1, self.num_micro_batches):
                total = total + self._losses[number]
            told[0], told[1] = total, _LOSS_TYPES.index(total.dtype)
        dist.broadcast(told, self._last_rank, group=self.group)
        return told[0].to(_LOSS_TYPES[int(told[1])])

    def run_collective(self, do: Callable[[], Result]) -> Result:
        """Do what needs other stages outside of a batch.

        Raises:
            PeerError: Another stage did not come.
        """
        try:
            return do()
        except (SamoError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise collective_error(error) from error

    def _loss(self, output: Any, number: Tensor, **_: Any) -> Tensor:
        """Return what goes backward of the weighted loss of a micro-batch."""
        batch = self._batch
        assert batch is not None, "run() sets the batch"
        assert batch.loss is not None, "only the last stage is asked"
        loss = batch.loss(int(number), output)
        self._losses[int(number)] = loss.detach()
        return loss if batch.scale is None else batch.scale(loss)
