"""What a run is about, as its loop sees it: the data, and the model that it trains.

`samo.train.gpt_subject` has those of ``samo train``, `samo.train.causal_lm_subject` those of
``samo finetune``.
"""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from samo.data.sources import Data
from samo.data.tokenizers import Tokenizer
from samo.train.finetune_config import Config
from samo.train.learner import Learner
from samo.train.masking import Masking
from samo.train.rank_group import RankGroup
from samo.train.run_dir import RunDir


class Text(NamedTuple):
    """The data of a run."""

    tokenizer: Tokenizer
    train: Data
    valid: Data
    vocab_size: int

    def fingerprint(self) -> str:
        """Return a hash of the data."""
        return f"{self.train.fingerprint()}-{self.valid.fingerprint()}"


class Subject:
    """A model, from its settings to the learner that trains it."""

    config: Config  # `open_text` and `new_learner` fill in what text and model decide
    text: Text  # once it is open
    reason = ""  # why weights and state are kept as they are; "" if the settings say so

    def open_text(self, out: Path) -> Text:
        """Open the data, and check that there is enough of it; ``out`` is the run folder."""
        raise NotImplementedError

    def new_learner(self, ranks: RankGroup, checkpoint: Path | None) -> Learner:
        """Return a learner at its first step, or one that the checkpoint will be loaded into.

        What fits neither the device nor the checkpoint is refused before it takes memory.
        """
        raise NotImplementedError

    def new_masking(self, learner: Learner) -> Masking | None:
        """Return when masks are drawn, and how they change; None if they stay as they are."""
        return None

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint tells of the model besides its tensors."""
        raise NotImplementedError

    def sample(self, learner: Learner, prompt_T: Tensor) -> Tensor:
        """Return a prompt, and as many tokens that continue it as the settings ask for."""
        raise NotImplementedError

    def write_files(self, folder: RunDir) -> None:
        """Write what the run folder needs, besides checkpoints, to stand for itself."""

    def finish(self, folder: RunDir, learner: Learner) -> None:
        """Write what a complete run hands on, besides its last checkpoint."""
