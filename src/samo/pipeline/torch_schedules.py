"""Schedules of fixed order, run by torch.distributed.pipelining.

torch's own division of gradients is off (it divides by the number of micro-batches, and twice where
gradients accumulate): the loss carries the weight of each micro-batch instead.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from samo.errors import SamoError, nearest
from samo.pipeline.runner import Batch, Result
from samo.pipeline.stage import Chunk, Stage
from samo.pipeline.transport.base import collective_error

__all__ = ["SCHEDULES", "TorchRunner", "check_schedule"]

_CLASSES: Final = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
}
SCHEDULES: Final = ("message-driven", *_CLASSES)
_LOSS_DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_schedule(schedule: str) -> None:
    """Refuse an unknown schedule.

    Raises:
        ValueError: It is not one of `SCHEDULES`.
    """
    if schedule not in SCHEDULES:
        raise ValueError(
            f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}"
            f"{nearest(str(schedule), SCHEDULES)}"
        )


class TorchRunner:
    """Computes batches with a schedule of torch's.

    Args:
        schedule: "1f1b", "gpipe" or "interleaved".
        module: The layers of this rank.
        numbers: The number of each piece of the model on this rank.
        pieces: First layer and the one after the last, of each piece.
        num_pieces: Pieces on all ranks.
        group: Ranks in the order of the stages.
        device: This rank's device.
        num_micro_batches: Micro-batches of every batch.
    """

    def __init__(
        self,
        schedule: str,
        module: Stage,
        numbers: Sequence[int],
        pieces: Sequence[tuple[int, int]],
        num_pieces: int,
        group: dist.ProcessGroup,
        device: torch.device,
        num_micro_batches: int,
    ) -> None:
        from torch.distributed import pipelining  # takes seconds to import

        self.schedule: Final = schedule
        self.num_micro_batches: Final = num_micro_batches
        self.group: Final = group
        self.device: Final = device
        ranks = dist.get_process_group_ranks(group)
        self._last_rank: Final = ranks[(num_pieces - 1) % len(ranks)]
        self._batch: Batch | None = None
        self._losses: Final[dict[int, Tensor]] = {}
        stages, place = [], 0
        for number, (start, stop) in zip(numbers, pieces):
            chunk = Chunk(module, place, place + stop - start)
            stages.append(pipelining.PipelineStage(chunk, number, num_pieces, device, group=group))
            place += stop - start
        self._schedule: Final = getattr(pipelining, _CLASSES[schedule])(
            stages if schedule == "interleaved" else stages[0],
            n_microbatches=num_micro_batches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self._is_first: Final = numbers[0] == 0
        self._is_last: Final = numbers[-1] == num_pieces - 1

    def run(self, batch: Batch, inputs: tuple[Tensor, ...]) -> Tensor:
        """Compute a batch and return its loss.

        Raises:
            ValueError: Its rows cannot be cut into equal micro-batches.
        """
        rows = len(inputs[0]) if inputs else 0
        if rows % self.num_micro_batches:
            raise ValueError(
                f"{rows} rows cannot be cut into {self.num_micro_batches} equal micro-batches, and "
                f"torch's schedule '{self.schedule}' takes no smaller ones; use 'message-driven', or drop "
                "the last rows"
            )
        self._batch = batch
        arguments = inputs if self._is_first else ()
        # torch also calls the loss to infer shapes, so its target is the number of the micro-batch.
        numbers = torch.arange(self.num_micro_batches)
        targets: dict[str, Any] = {"target": numbers} if self._is_last else {}
        compute = self._schedule.step if batch.is_training else self._schedule.eval
        with nullcontext() if batch.is_training else torch.no_grad():
            compute(*arguments, **targets)
        # Its value, which float64 holds exactly, and its dtype, which the other ranks cannot know.
        packed = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self._is_last:
            total = self._losses[0]
            for number in range(1, self.num_micro_batches):
                total = total + self._losses[number]
            packed[0], packed[1] = total, _LOSS_DTYPES.index(total.dtype)
        dist.broadcast(packed, self._last_rank, group=self.group)
        return packed[0].to(_LOSS_DTYPES[int(packed[1])])

    def run_collective(self, do: Callable[[], Result]) -> Result:
        """Run something that all stages do together outside of a batch.

        Raises:
            PeerError: Another stage did not join.
        """
        try:
            return do()
        except (SamoError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise collective_error(error) from error

    def _loss(self, output: Any, number: Tensor, **_: Any) -> Tensor:
        """Return the weighted loss of a micro-batch, scaled for backward."""
        batch = self._batch
        assert batch is not None, "run() sets the batch"
        assert batch.loss is not None, "torch calls it on the last stage alone"
        loss = batch.loss(int(number), output)
        self._losses[int(number)] = loss.detach()
        return loss if batch.scale is None else batch.scale(loss)
