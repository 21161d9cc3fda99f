"""From settings to what a run starts with: device and type, model, and the record of it all."""

import dataclasses
import datetime
from pathlib import Path
from typing import Any, Final

import torch

from samo.checkpoint.load import load
from samo.errors import ConfigError, RunError
from samo.models.gpt import GPT
from samo.train.config import TrainConfig, gpt_config, resolve
from samo.train.config_files import changes, to_dict
from samo.train.config_mesh import micro_batches
from samo.train.config_methods import MOVING
from samo.train.config_weights import compiles_by_default, resolve_weights
from samo.train.folder import RunFolder
from samo.train.launches import launcher
from samo.train.learner import Learner
from samo.train.ranks import Ranks
from samo.train.stages import Stages
from samo.train.text import Text
from samo.train.typed import command_line
from samo.utils.environment import hardware, versions

__all__ = []

CHANGEABLE: Final = frozenset(
    {
        "run.steps",
        "run.eval_every",
        "run.eval_batches",
        "run.save_every",
        "run.save_errors",
        "run.log_every",
        "run.sample_tokens",
        "run.weights",
        "run.compile",
        "data.train",
        "data.valid",
        "mesh.pipe",
        "mesh.data",
        "mesh.micro_batches",
        "mesh.pipe_schedule",
        "mesh.shard",
        "mesh.timeout_s",
    }
)
"""What a resumed run may change: how long, how often, on how many ranks, how weights are held and
computed with; and where the text lies now."""


def on_this_machine(config: TrainConfig) -> TrainConfig:
    """Replace what is left of "auto", device and type, and make paths independent of the folder.

    Raises:
        ConfigError: A setting cannot be used, here or anywhere.
    """
    config = _with_full_paths(resolve(config))
    run = config.run
    has_cuda = torch.cuda.is_available()
    if run.device == "cuda" and not has_cuda:
        raise ConfigError(
            "device cuda was asked for, and this machine has none that torch can use; leave it out to "
            "train on the CPU"
        )
    device = run.device
    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    dtype = run.dtype
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    elif dtype == "auto":
        dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    config = dataclasses.replace(config, run=dataclasses.replace(run, device=device, dtype=dtype))
    if run.compile is None:
        found = compiles_by_default(config)
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, compile=found))
    return resolve(config)  # again: what dtype turned out to be may contradict another setting


def check_memory(config: TrainConfig) -> None:
    """Refuse a model whose state alone is more than the device has, before it fills it.

    Raises:
        ConfigError: It does not fit.
    """
    assert isinstance(config.data.vocab_size, int)
    with torch.device("meta"):
        model = GPT(gpt_config(config.model, config.data.vocab_size))
    count = sum(param.numel() for param in model.parameters())
    is_watched = config.prune.method in ("early-bird", "gradual")  # these begin with all weights
    is_dense = config.run.mode != "samo" or config.prune.dense_steps != 0 or is_watched
    # fp32 weights, gradients and moments; or fp32 weights until they are compressed.
    needed = (16 if is_dense else 4) * count // config.mesh.pipe
    there = hardware(torch.device(config.run.device))["memory_bytes"]
    if there and needed > there:
        can_skip = is_dense and config.run.mode == "samo" and not is_watched
        less = ", no dense phase (--dense-steps 0)" if can_skip else ""
        if is_watched and config.run.mode == "samo":
            less = ", a method that needs no dense state (--method rigl)"
        raise ConfigError(
            f"a model of {count:,} parameters needs {needed / 1e9:,.1f} GB "
            f"{'for its dense phase' if is_dense else 'to begin with'}, activations not counted, and "
            f"this {config.run.device} has {there / 1e9:,.1f} GB; choose a smaller --shape{less}, or a "
            "larger machine"
        )


def new_learner(
    config: TrainConfig, ranks: Ranks | None = None, *, is_filled_later: bool = False
) -> Learner:
    """Return a learner with its first weights: of ``model.init``, or from seed and device.

    Args:
        config: Resolved settings.
        ranks: Who learns together; one process alone if nothing is said.
        is_filled_later: A checkpoint will be loaded; then ``model.init`` need not be there any more.

    Raises:
        CheckpointError: ``model.init`` cannot be read, or is of another model.
    """
    ranks = ranks or Ranks()
    stages: Stages | None = None
    if ranks.num_stages > 1:
        stages = Stages(config, ranks)
        model: torch.nn.Module = stages.pipeline.module
    else:
        model = _new_model(config)
    if config.model.init is not None and not is_filled_later:
        whole = model if stages is None else stages.pipeline
        load(config.model.init, whole, mesh=ranks.mesh, timeout_s=ranks.timeout_s)
    return Learner(
        model,
        config.optim,
        dtype=getattr(torch, config.run.dtype),
        fp32_gradients=config.run.fp32_gradients,
        entry_steps=config.prune.method in MOVING,
        weights=resolve_weights(config.run.weights),
        is_compiled=bool(config.run.compile),
        is_sharded=config.mesh.shard == "weights",
        ranks=ranks,
        stages=stages,
    )


def _new_model(config: TrainConfig) -> GPT:
    assert isinstance(config.data.vocab_size, int)
    torch.manual_seed(config.run.seed)
    with torch.device(config.run.device):
        return GPT(gpt_config(config.model, config.data.vocab_size))


def check_changes(recorded: TrainConfig, wanted: TrainConfig, *, is_resolved: bool = True) -> None:
    """Refuse to resume a run with settings that would make it another run.

    Args:
        recorded: The settings of the run.
        wanted: Those to go on with.
        is_resolved: Whether "auto" in the wanted ones is a value; if not, it may become the recorded one.

    Raises:
        ConfigError: A setting differs that may not.
    """
    differing = changes(recorded, _with_full_paths(wanted))
    refused = {k: v for k, v in differing.items() if k not in CHANGEABLE}
    if not is_resolved:
        refused = {k: v for k, v in refused.items() if v[1] != "auto"}
    if refused:
        key, (old, new) = next(iter(refused.items()))
        names = sorted(key.partition(".")[2] for key in CHANGEABLE - {"data.train"})
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ConfigError(
            f"a resumed run keeps its settings, and {key} was {old!r}, not {new!r}; leave it out, or "
            f"start a new run. What may change: {flags}, and where the text lies"
        )


def check_same_text(folder: RunFolder, text: Text) -> None:
    """Refuse to resume a run on another text.

    Raises:
        RunError: It has changed.
    """
    data = folder.read_run().get("data")
    if not isinstance(data, dict) or data.get("fingerprint") != text.fingerprint():
        raise RunError(
            f"the text of '{folder.path}' has changed since it was trained on, and a run goes on with "
            "the same text only; put the old files back, name them where they lie now, or start a new "
            "run. (Tokens that a tokenizer made lie in its folder 'data'; if those are damaged, remove it)"
        )


def record(config: TrainConfig, out: Path, text: Text, learner: Learner) -> dict[str, Any]:
    """Return the content of run.json: what is run, on what, and where."""
    return {
        "name": out.resolve().name,
        "command": command_line(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": to_dict(config),
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
        "ranks": layout(learner.ranks, config),
        "launcher": launcher(),
    }


def layout(ranks: Ranks, config: TrainConfig) -> dict[str, int]:
    """Return the grid as run.json records it: also what "auto" became, which another grid may not keep."""
    grid = {"pipe": ranks.num_stages, "data": ranks.num_replicas}
    if ranks.num_stages > 1:
        grid["micro_batches"] = micro_batches(config, ranks.num_replicas)
    return grid


def _with_full_paths(config: TrainConfig) -> TrainConfig:
    data, model, prune = config.data, config.model, config.prune
    tokenizer = data.tokenizer
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data,
            train=tuple(path.absolute() for path in data.train),
            valid=tuple(path.absolute() for path in data.valid),
            tokenizer=tokenizer.absolute() if isinstance(tokenizer, Path) else tokenizer,
        ),
        model=dataclasses.replace(model, init=model.init and model.init.absolute()),
        prune=dataclasses.replace(prune, masks=prune.masks and prune.masks.absolute()),
    )
