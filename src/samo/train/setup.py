"""What a run starts with: the text, the model, and the record of it all."""

import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from samo.checkpoint.load import load
from samo.data.batches import Batches, validation_batches
from samo.data.tokenizers import Tokenizer, open_tokenizer
from samo.data.tokens import Tokens, open_tokens
from samo.errors import ConfigError, DataError, RunError
from samo.models.gpt import GPT
from samo.models.shapes import GPTConfig
from samo.train.config import ResolvedConfig
from samo.train.config_io import to_dict
from samo.train.launch_env import command_line, launcher
from samo.train.learner import Learner
from samo.train.pipelined_gpt import PipelinedGPT
from samo.train.rank_group import RankGroup
from samo.train.resolve import micro_batches
from samo.train.run_dir import RunDir
from samo.utils.environment import hardware, versions

__all__ = []


class Text(NamedTuple):
    """The data of a run."""

    tokenizer: Tokenizer
    train: Tokens
    valid: Tokens
    vocab_size: int

    def fingerprint(self) -> str:
        """Return a hash of the text."""
        return f"{self.train.fingerprint()}-{self.valid.fingerprint()}"


def open_text(config: ResolvedConfig, out: Path) -> Text:
    """Open the data, and check that there is enough of it."""
    data, context = config.data, config.model.context
    tokenizer = open_tokenizer(str(data.tokenizer))
    size = None if data.vocab_size == "auto" else data.vocab_size
    train = open_tokens(data.train, tokenizer=tokenizer, cache=out / "data", vocab_size=size)
    if data.valid:
        valid = open_tokens(data.valid, tokenizer=tokenizer, cache=out / "data", vocab_size=size)
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
    return Text(tokenizer, train, valid, max(train.vocab_size, valid.vocab_size))


def open_same_text(config: ResolvedConfig, run: RunDir) -> Text:
    """Open the data of a run that resumes."""
    try:
        text = open_text(config, run.path)
    except DataError as error:
        again = f"samo train NEW-PLACE --resume {run.path}"
        raise DataError(f"{error}; if the text has moved, name it again: {again}") from None
    recorded = run.read_run().get("data")
    if not isinstance(recorded, dict) or recorded.get("fingerprint") != text.fingerprint():
        raise RunError(
            f"the text of '{run.path}' has changed, and a run resumes with the same text only; "
            "restore the old files, or start a new run. (If the tokens in its folder 'data' are "
            "damaged, remove it)"
        )
    return text


def check_memory(config: ResolvedConfig, shape: GPTConfig, num_replicas: int) -> None:
    """Refuse a model whose state and activations, at the least, exceed the memory of the device."""
    with torch.device("meta"):
        count = sum(param.numel() for param in GPT(shape).parameters())
    prune, run, num_stages = config.prune, config.run, config.mesh.pipe
    starts_pruned = prune.dense_steps == 0 and prune.method != "gradual"
    is_dense = run.mode == "dense" or not starts_pruned
    # fp32 weights, gradients and moments; or fp32 weights until they are compressed.
    state = (16 if is_dense else 4) * count // num_stages
    # A block saves 16 values of its width for each token, or with checkpointing its input; a stage
    # holds one micro-batch at least.
    parts = num_replicas * (micro_batches(config, num_replicas) if num_stages > 1 else 1)
    tokens = run.batch_size * shape.context // parts
    blocks = shape.num_layers * (1 if shape.is_checkpointed else 16) // num_stages
    saved = tokens * blocks * shape.width * (4 if run.dtype == "float32" else 2)
    available = hardware(torch.device(run.device))["memory_bytes"]
    if available and state + saved > available:
        raise ConfigError(
            f"a model of {count:,} parameters needs {state / 1e9:,.1f} GB "
            f"{'for its dense phase' if is_dense else 'at the start'} and {saved / 1e9:,.1f} GB or "
            f"more for the activations of {run.batch_size} x {shape.context:,} tokens; this "
            f"{run.device} has {available / 1e9:,.1f} GB. Lower --batch-size or --context, use "
            "--checkpointing, a smaller --shape, or --method rigl, which has no dense phase"
        )


def new_learner(
    config: ResolvedConfig, shape: GPTConfig, ranks: RankGroup, *, loads_later: bool = False
) -> Learner:
    """Return a learner with initial weights: those of ``model.init``, or drawn from the seed.

    If a checkpoint ``loads_later``, ``model.init`` need not exist any more.
    """
    stages: PipelinedGPT | None = None
    if ranks.num_stages > 1:
        stages = PipelinedGPT(config, shape, ranks)
        model: torch.nn.Module = stages.pipeline.module
    else:
        torch.manual_seed(config.run.seed)
        with torch.device(config.run.device):
            model = GPT(shape)
    if config.model.init is not None and not loads_later:
        whole = model if stages is None else stages.pipeline
        load(config.model.init, whole, mesh=ranks.mesh, timeout_s=ranks.timeout_s)
    return Learner(model, config, ranks=ranks, stages=stages)


def new_batches(config: ResolvedConfig, text: Text, ranks: RankGroup) -> Batches:
    """Return the batches of this rank, from the beginning of the text."""
    return Batches(
        text.train,
        context=config.model.context,
        batch_size=config.run.batch_size,
        seed=config.run.seed,
        part=ranks.part,
    )


def run_record(config: ResolvedConfig, out: Path, text: Text, learner: Learner) -> dict[str, Any]:
    """Return the content of run.json: what is run, on what, and where."""
    return {
        "name": out.resolve().name,
        "command": command_line(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": {"num_params": learner.num_params},
        "data": {
            "train_tokens": text.train.num_tokens,
            "valid_tokens": text.valid.num_tokens,
            "tokenizer": text.tokenizer.name,
            "vocab_size": text.vocab_size,
            "fingerprint": text.fingerprint(),
        },
        "versions": versions(),
        "hardware": hardware(learner.device),
        **launch_record(config, learner.ranks),
    }


def launch_record(config: ResolvedConfig, ranks: RankGroup) -> dict[str, Any]:
    """Return the part of run.json that may change when a run resumes."""
    sizes = {"pipe": ranks.num_stages, "data": ranks.num_replicas}
    if ranks.num_stages > 1:
        sizes["micro_batches"] = micro_batches(config, ranks.num_replicas)
    return {"config": to_dict(config), "ranks": sizes, "launcher": launcher()}
