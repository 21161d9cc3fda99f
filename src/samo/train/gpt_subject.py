"""The model and the data of ``samo train``: a GPT, and a text."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samo.checkpoint.load import check_shape, load
from samo.data.batches import validation_batches
from samo.data.tokenizers import open_tokenizer
from samo.data.tokens import open_tokens
from samo.errors import DataError
from samo.integrations.model_folders import find
from samo.models.generate import Sampling, stream
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig
from samo.train.config import AUTO, TrainConfig, with_values
from samo.train.learner import Learner
from samo.train.masking import Masking
from samo.train.planning import check_memory
from samo.train.rank_group import RankGroup
from samo.train.resolve import gpt_config
from samo.train.staged_learner import StagedLearner
from samo.train.subject import Subject, Text


class GPTSubject(Subject):
    """A GPT that learns a text from scratch, or from the weights of a checkpoint."""

    config: TrainConfig

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @property
    def _shape(self) -> GPTConfig:
        return gpt_config(self.config.model, self.text.vocab_size)

    def open_text(self, out: Path) -> Text:
        """Open the text; its vocabulary is the model's."""
        data, context = self.config.data, self.config.model.context
        tokenizer = open_tokenizer(str(data.tokenizer))
        known = None if data.vocab_size == AUTO else data.vocab_size
        how: dict[str, Any] = {"tokenizer": tokenizer, "cache": out / "data", "vocab_size": known}
        train = open_tokens(data.train, **how)
        if data.valid:
            valid = open_tokens(data.valid, **how)
        else:
            train, valid = train.split(data.valid_fraction, min_tokens=context + 1)
        for name, part, paths in (
            ("to train on", train, data.train),
            ("to validate on", valid, data.valid or data.train),
        ):
            try:
                validation_batches(part, context=context, batch_size=1, max_batches=1)
            except DataError as error:
                files = ", ".join(f"'{path.name}'" for path in paths)
                raise DataError(f"the text {name} ({files}): {error}") from None
        size = max(train.vocab_size, valid.vocab_size)
        self.config = with_values(self.config, vocab_size=size)
        self.text = Text(tokenizer, train, valid, size)
        return self.text

    def new_learner(self, ranks: RankGroup, checkpoint: Path | None) -> Learner:
        """Return a learner with initial weights: those of ``model.init``, or drawn from the seed.

        If a checkpoint is loaded later, ``model.init`` need not exist any more.
        """
        config = self.config
        if checkpoint is None:
            check_memory(config, ranks.num_replicas)
        else:
            ranks.run_all("the checkpoint", lambda: check_shape(checkpoint, self._shape))
        if ranks.num_stages > 1:
            learner: Learner = StagedLearner(config, self._shape, ranks)
        else:
            torch.manual_seed(config.run.seed)
            with torch.device(config.run.device):
                model = GPT(self._shape)
            learner = Learner(model, config, ranks=ranks)
        if (init := config.model.init) is not None and checkpoint is None:
            place = ranks.run_all("the initial weights", partial(find, init))
            load(place.weights, learner.whole, mesh=ranks.mesh, timeout_s=ranks.timeout_s)
        return learner

    def new_masking(self, learner: Learner) -> Masking | None:
        """Return the masks of the settings, if the model is to be pruned."""
        return None if self.config.run.mode == "dense" else Masking(self.config, learner)

    def record(self) -> dict[str, Any]:
        """Return the shape, from which `samo.integrations` builds the model."""
        return {"model": asdict(self._shape), "tokenizer": self.text.tokenizer.name}

    def sample(self, learner: Learner, prompt_T: Tensor) -> Tensor:
        """Continue a prompt."""
        run, context = self.config.run, self.config.model.context
        how = Sampling(run.sample_tokens, seed=run.seed)
        drawn = list(stream(learner.model, prompt_T, how, context=context))
        return torch.cat([prompt_T.cpu(), torch.tensor(drawn, dtype=torch.int64)])
