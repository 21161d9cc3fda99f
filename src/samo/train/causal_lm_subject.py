"""The model and the data of ``samo finetune``: a language model of Hugging Face, and examples.

The device gets a compressed model. One that is stored so, as in every checkpoint, is read without a
dense one on the way. Others are opened on the CPU, in the dtype of their files, and compressed.
"""

import logging
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from samo.core.compress import compress_, keep_resident
from samo.data.batches import Batch, Batches
from samo.data.calibration import example_batches
from samo.data.examples import Examples
from samo.data.sources import open_data
from samo.errors import ConfigError, MaskError, RunError
from samo.integrations import causal_lm, checked_loading, folder_files
from samo.integrations.chunk_loss import Distillation, chunk_loss_, deferred_logits
from samo.integrations.export import export
from samo.integrations.model_folders import (
    HUGGING_FACE,
    find,
    load_masks,
    open_compressed,
    open_empty,
    open_masks,
    open_model,
)
from samo.integrations.model_tokenizer import ModelTokenizer
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters, prunable
from samo.models.generate import Sampling
from samo.pruning.blocks import find_blocks
from samo.pruning.prune import prune
from samo.pruning.zeros import refuse_zeros
from samo.train.config import with_values
from samo.train.finetune_config import FinetuneConfig, FinetuneModel
from samo.train.launch_env import prune_command
from samo.train.learner import Learner, compression
from samo.train.planning import choose_layout
from samo.train.rank_group import RankGroup
from samo.train.resolve import with_steps
from samo.train.rules import pruning
from samo.train.run_dir import RunDir
from samo.train.subject import Subject, Text
from samo.utils.formatting import counted, percent

_log: Final = logging.getLogger(__name__)

_CALIBRATION_ROWS: Final = 128
_FEW_TOKENS: Final = 2**15
"""Sequences of the training data that Wanda and SparseGPT look at, as their papers do."""


class CausalLMSubject(Subject):
    """A pruned language model that learns examples; ``run`` is the folder of a run that resumes."""

    config: FinetuneConfig

    def __init__(self, config: FinetuneConfig, run: RunDir | None = None) -> None:
        self.config = config
        self._model: nn.Module
        if run is not None:
            self._folder = run.path / HUGGING_FACE
            if not (self._folder / folder_files.CONFIG).is_file():
                raise RunError(
                    f"'{run.path}' is not complete: it has no {HUGGING_FACE}/config.json; take "
                    "another copy of the run"
                )
            folder_files.check_entries(self._folder)
            return
        source = find(config.source).hugging_face  # in which nothing is a link
        if source is None:
            raise ConfigError(
                f"'{config.source}' is a GPT of samo train; train it on with samo train TEXT "
                f"--init {config.source}/checkpoints/last"
            )
        self._folder = source

    # The data

    def open_text(self, out: Path) -> Text:
        """Open the data, with the tokenizer of the model; steps and context follow from both."""
        about = checked_loading.text_config(self._folder)
        data = self.config.data
        context = causal_lm.resolve_context(self.config.model.context, causal_lm.context_of(about))
        tokenizer = ModelTokenizer(self._folder)
        known = about.vocab_size
        train, valid = open_data(
            data.data,
            data.valid,
            valid_fraction=data.valid_fraction,
            tokenizer=tokenizer,
            context=context,
            cache=out / "data",
            vocab_size=known,
            is_packed=data.pack,
        )
        size = self.config.run.batch_size
        rows = Batches(train, context=context, batch_size=size, seed=self.config.run.seed)
        taken = size * self.config.run.accumulate
        if taken > rows.num_windows:
            _log.warning(
                "the data fills %s, and a step takes %s: it reads some of them again; lower "
                "--batch-size, --accumulate or --context",
                counted(rows.num_windows, "sequence"),
                f"{taken:,}",
            )
        self.config = with_steps(with_values(self.config, context=context), rows.num_windows)
        self.text = Text(tokenizer, train, valid, known)
        if isinstance(train, Examples):
            self._warn_of_endless_text(train, tokenizer)
        return self.text

    def _warn_of_endless_text(self, examples: Examples, tokenizer: ModelTokenizer) -> None:
        """Warn if examples end with a token at which the model will not stop writing."""
        found, ends = examples.last_tokens(), causal_lm.end_tokens(self._folder)
        if not ends or not ends.isdisjoint(found):
            return
        last = max(set(found), key=found.count)
        _log.warning(
            "examples end with token %s (%r), but the model stops writing at %s: its text will "
            "not end. Add %s to eos_token_id in '%s', or end the turns of the chat template with "
            "that token",
            *(last, tokenizer.backend.id_to_token(last)),
            " and ".join(f"{end} ({tokenizer.backend.id_to_token(end)!r})" for end in sorted(ends)),
            *(last, self._folder / folder_files.GENERATION),
        )

    # The model

    def new_learner(self, ranks: RankGroup, checkpoint: Path | None) -> Learner:
        """Return a learner of the compressed model, with its loss in chunks."""
        config = self.config
        torch.manual_seed(config.run.seed)  # of dropout
        source = checkpoint or config.source
        model, masks = self._open(source, is_own=checkpoint is not None)
        teacher = self._open_teacher(model)
        found = choose_layout(config, model, masks, teacher, ranks.num_replicas)
        weights, state, self.reason = ranks.all_gather("weights and state", found)[0]
        self.config = with_values(config, weights=weights, state=state)
        dtypes = compression(self.config, ranks)
        freeze = causal_lm.freeze_embeddings_ if config.model.freeze_embeddings else None
        if next(model.parameters()).is_meta:
            model = open_compressed(source, weights="streamed", prepare=freeze, **dtypes)
            self._check(model)
        else:
            if freeze is not None:
                freeze(model)
            compress_(model, masks, weights="streamed", **dtypes)
        keep_resident(model.to(config.run.device), weights)  # there, and not on the host
        if getattr(self.text.train, "is_packed", False):
            causal_lm.check_packing(model)
        if config.model.checkpointing:
            causal_lm.checkpoint_blocks(model)
        chunk_loss_(model.train())
        causal_lm.check_loss(model)
        self._model = model
        return Learner(
            model,
            self.config,
            ranks=ranks,
            loss_sum=partial(_loss_sum, teacher=teacher, how=config.model),
            blocks=lambda model: find_blocks(model)[1],
        )

    def _open(self, source: Path, *, is_own: bool) -> tuple[nn.Module, Masks]:
        """Return a model and its masks; one that is stored compressed has no memory yet."""
        settings = self.config.prune
        if is_own or not (settings.prunes or settings.masks):
            empty = open_empty(source)
            if empty is not None and (masks := open_masks(source, empty)) is not None:
                return empty, masks
        model = open_model(source)
        self._check(model)
        if settings.masks is not None:
            masks = load_masks(settings.masks)
            masks.parameters_of(model)  # which refuses masks that do not fit
        elif settings.prunes:
            masks = self._prune(model)
        else:
            masks = open_masks(source, model) or self._zeros(model)
        return model, masks

    def _check(self, model: nn.Module) -> None:
        causal_lm.check_weights(model, getattr(torch, self.config.run.dtype))
        causal_lm.check_model(model)

    def _zeros(self, model: nn.Module) -> Masks:
        source = self.config.source
        try:
            return Masks.from_zeros(model)
        except MaskError as error:
            own = dense_parameters(model)
            sizes = [own[name].numel() for name in prunable(model)]
            zeros = sum(int((own[name] == 0).sum()) for name in prunable(model))
            raise ConfigError(
                f"'{source}' is not pruned: {zeros:,} of {sum(sizes):,} weights of its matrices "
                f"are 0 ({percent(zeros / max(sum(sizes), 1))}); prune it on the way with "
                f"--sparsity 0.5 --method wanda, or before with {prune_command(source)}"
            ) from error

    def _prune(self, model: nn.Module) -> Masks:
        settings, run = self.config.prune, self.config.run
        how = {**settings.choice(), "method": settings.method, "seed": run.seed}
        if settings.method in ("wanda", "sparsegpt"):
            found = example_batches(
                self.text.train,
                samples=_CALIBRATION_ROWS,
                context=self.config.model.context,
                seed=run.seed,
            )
            how |= {"calibration": found, "device": run.device}
            if (size := sum(rows.numel() for rows in found)) < _FEW_TOKENS:
                _log.warning(
                    "%s looks at %s tokens of the training data only, and masks may be poor: use "
                    "more data, or samo prune %s --calibration FILE first",
                    *(settings.method, f"{size:,}", shlex.quote(str(self.config.source))),
                )
        with pruning(self.config.source), refuse_zeros(otherwise="leave --sparsity out"):
            return prune(model, **how)

    def _open_teacher(self, model: Any) -> nn.Module | None:
        """Return the teacher on the device, in the compute dtype, without gradients."""
        run, path = self.config.run, self.config.model.teacher
        if path is None:
            return None
        teacher: Any = open_model(path, dtype=getattr(torch, run.dtype))
        sizes = [each.get_output_embeddings().weight.shape[0] for each in (teacher, model)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the teacher '{path}' has a vocabulary of {sizes[0]:,} tokens, the model one of "
                f"{sizes[1]:,}; use one with the same tokenizer, such as the dense model"
            )
        return chunk_loss_(teacher.requires_grad_(False).eval().to(run.device))

    # What it leaves

    def record(self) -> dict[str, Any]:
        """Return the kind of the model; RUN/hugging-face describes it."""
        return {"model": type(self._model).__name__}

    def sample(self, learner: Learner, prompt_T: Tensor) -> Tensor:
        """Continue a prompt."""
        run, own = self.config.run, self._model.config
        longest = causal_lm.context_of(own) or len(prompt_T) + run.sample_tokens
        num_tokens = max(1, min(run.sample_tokens, longest - len(prompt_T)))
        return causal_lm.sample(learner.model, prompt_T, Sampling(num_tokens, seed=run.seed))

    def write_files(self, folder: RunDir) -> None:
        """Write config and tokenizer: with a checkpoint, they are the model."""
        causal_lm.write_description(self._model, self._folder, folder.path / HUGGING_FACE)

    def finish(self, folder: RunDir, learner: Learner) -> None:
        """Write the model as a compressed folder, in place of that of a run that was extended."""
        out, own = folder.path / "model", folder.path / HUGGING_FACE
        if learner.ranks.is_first:
            is_sharded = self.config.mesh.shard == "weights"
            model = open_compressed(folder.path) if is_sharded else learner.model
            # The last part of its path is the title of the model card.
            draft = folder.path / ".draft" / folder.path.resolve().name
            shutil.rmtree(draft.parent, ignore_errors=True)  # what a kill has left
            export(model, draft, format="compressed", source=own)
            if out.exists():
                out.rename(draft.parent / "old")  # nobody finds a folder that is half removed
            draft.rename(out)
            shutil.rmtree(draft.parent)


def _loss_sum(
    model: nn.Module, batch: Batch, *, teacher: nn.Module | None, how: FinetuneModel
) -> Tensor:
    """Return the sum of the losses of a batch, those of training with the teacher's part."""
    more: dict[str, Any] = {}
    if teacher is not None and torch.is_grad_enabled():
        with torch.no_grad():
            logits = deferred_logits(teacher, **causal_lm.inputs_of(batch))
        more["distillation"] = Distillation(logits, how.distill, how.temperature)
    return causal_lm.loss_sum(model, batch, **more)
