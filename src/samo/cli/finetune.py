"""``samo finetune``: a run as `samo.cli.train` does it, of a model of Hugging Face."""

import os

from samo.cli import train
from samo.cli.commands import Finetune

__all__ = []


def run(command: Finetune) -> int:
    """Fine-tune, or resume a run."""
    # transformers shows bars and reminders of its own between the lines of the run.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return train.run(command)
