"""Fill in settings that are "auto".

magnitude, random   masks are drawn once, after the dense phase
early-bird          the same, as soon as the masks are stable; the dense phase is the limit
gradual             masks keep everything at first, and lose weights step by step
set, rigl           masks keep their sparsity, and move
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from samo.errors import ConfigError
from samo.models.shapes import SHAPES, GPTConfig
from samo.pruning.pattern import parse_pattern, pattern_sparsity
from samo.train.config import AUTO, MeshConfig, ModelConfig, TrainConfig, Weights, with_values
from samo.train.finetune_config import KINDS, Config, FinetuneConfig
from samo.train.metrics import is_installed
from samo.train.rules import CHANGING, MOVING, check_ranges, flag, problems
from samo.utils.formatting import counted

_log: Final = logging.getLogger(__name__)

DEFAULT_SPARSITY: Final = 0.9
DTYPES: Final[dict[str, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SIZES: Final = ("num_layers", "width", "num_heads", "context")

CHANGEABLE: Final = frozenset(
    {"steps", "eval_every", "eval_batches", "save_every", "save_minutes", "keep", "log_every"}
    | {"sample_tokens", "wandb"}
    | {"weights", "compile", "train", "valid"}
    | {entry.name for entry in fields(MeshConfig)}
)
"""Settings that a resumed run may change. ``train`` and ``valid`` are where the text is."""

Kind = TypeVar("Kind", bound=Config)


def resolve(config: Kind) -> Kind:
    """Return the settings with every "auto" replaced, and with absolute paths.

    What the data, a model of Hugging Face, or the number of ranks decides stays "auto": a run may
    resume on another number of ranks.

    Example:
        >>> from pathlib import Path
        >>> from samo.train.config import DataConfig, TrainConfig
        >>> from samo.train.resolve import resolve
        >>> resolve(TrainConfig(data=DataConfig(train=(Path("notes.txt"),)))).prune.dense_steps
        200

    Raises:
        ConfigError: A setting is out of range, conflicts with another, or needs a GPU.
    """
    if config.run.wandb is not None and not is_installed("wandb"):
        raise ConfigError("--wandb needs a package that is missing: pip install wandb")
    if config.mesh.shard == "weights" and config.run.weights == "resident":
        config = with_values(config, weights=AUTO)  # but shards are streamed
    kind = KINDS[config.kind]
    check_ranges(config)
    if isinstance(config, FinetuneConfig):
        values = _finetune_values(config)
    else:
        values = _train_values(config)
    sections = {each.name: filled(getattr(config, each.name), values) for each in fields(kind)}
    resolved: Any = kind(**sections)
    for message in problems(resolved):
        raise ConfigError(message)
    if isinstance(config, TrainConfig) and config.mesh.plan and not config.mesh.reason:
        from samo.train.planning import planned  # loads torch

        return planned(config, resolved)  # type: ignore[return-value]
    return resolved


def _train_values(config: TrainConfig) -> dict[str, Any]:
    if not config.data.train:
        raise ConfigError("no text to train on; name a file: samo train notes.txt")
    for path in (*config.data.train, *config.data.valid):
        if path.suffix in (".jsonl", ".ndjson", ".parquet"):
            raise ConfigError(
                f"'{path}' has examples, and samo train reads plain text; fine-tune a model on "
                f"them: samo finetune MODEL_DIR --data {path}; or write their text to a .txt file"
            )
    prune, steps = config.prune, config.run.steps
    shape, is_dense = SHAPES[config.model.shape], config.run.mode == "dense"
    is_trained = config.model.init is not None
    warmup_steps = _given(config.optim.warmup_steps, min(steps // 20, 1000))
    method = "none" if is_dense else prune.method
    starts_pruned = method in ("none", *MOVING) or is_trained or prune.masks is not None
    dense_steps = steps // 2 if method == "early-bird" else 0 if starts_pruned else steps // 5
    dense_steps = _given(prune.dense_steps, dense_steps)
    mask_every, mask_stop = 1, 0
    if method == "early-bird":
        # Masks one step apart are always close: at least 5 steps, if the dense phase has room.
        room = (dense_steps - warmup_steps) // prune.queue
        mask_every = max(1, min(max(steps // 200, 5), room))
    elif method in CHANGING:
        mask_every = max(1, min(steps // 40, 100))
        mask_stop = dense_steps + max(1, 3 * (steps - dense_steps) // 4)
    return {
        **{name: getattr(shape, name) for name in _SIZES},
        "checkpointing": False,
        "sparsity": resolve_sparsity(prune.sparsity, prune.pattern),
        "dense_steps": dense_steps,
        "mask_every": mask_every,
        "mask_stop": mask_stop,
        "lr": shape.lr,
        "warmup_steps": warmup_steps,
        "density_power": 0.0 if is_dense or is_trained else -1.0,
        "state": "exact",
        "weights": "streamed" if config.mesh.shard == "weights" else "resident",
        "pipe": 1,
        "shard": "none",
        **device_and_dtype(config.run.device),
    }


def _finetune_values(config: FinetuneConfig) -> dict[str, Any]:
    example = "samo finetune my-llama --data notes.jsonl"
    if config.model.model is None:
        raise ConfigError(f"no model to fine-tune; name its folder: {example}")
    if not config.data.data:
        raise ConfigError(f"no data to train on; name a file: {example}")
    machine = device_and_dtype(config.run.device)
    values = {**machine, "checkpointing": machine["device"] == "cuda", "shard": "none"}
    if config.mesh.shard == "weights":
        values |= {"weights": "streamed", "state": "exact"}  # shards may split values at any place
    return values


def with_steps(config: FinetuneConfig, sequences: int) -> FinetuneConfig:
    """Return settings whose steps and warmup follow from the sequences of an epoch."""
    run = config.run
    taken = run.batch_size * run.accumulate
    epochs = _given(run.epochs, 1.0)
    # Rounded, since 1.1 * 50 is 55.000000000000007.
    steps = _given(run.steps, max(1, math.ceil(round(epochs * sequences / taken, 9))))
    warmup_steps = _given(config.optim.warmup_steps, math.ceil(0.03 * steps))
    # The steps say it from here on.
    return with_values(config, steps=steps, epochs=AUTO, warmup_steps=warmup_steps)


# Runs that resume


def again(recorded: Config, mesh: Any = None) -> Config:
    """Return the settings that a resume begins with: as recorded, on any number of ranks.

    What was planned for the ranks is "auto" again; optimizer state and checkpointing stay.
    """
    free = {"data", *recorded.mesh.planned} - {"state", "checkpointing"}
    run: Any = recorded.run
    run = replace(run, **{name: AUTO for name in free if hasattr(run, name)})
    axes = {name: AUTO for name in free if hasattr(recorded.mesh, name)}
    mesh = mesh or replace(recorded.mesh, planned=(), reason="", **axes)
    return replace(recorded, run=run, mesh=mesh)


def resolve_resumed(recorded: Config, wanted: Config) -> Config:
    """Return the settings of a resumed run: "auto" means as recorded, but for the mesh."""
    sections = {}
    for section in fields(recorded):
        before, after = getattr(recorded, section.name), getattr(wanted, section.name)
        known = {entry.name: getattr(before, entry.name) for entry in fields(before)}
        if wanted.mesh.plan:
            known.pop("weights", None)  # may differ on other ranks
        sections[section.name] = filled(after, {} if section.name == "mesh" else known)
        for entry in fields(before):
            was, value = (getattr(each, entry.name) for each in (before, sections[section.name]))
            if value != was and entry.name not in CHANGEABLE:
                raise ConfigError(
                    f"a resumed run keeps its settings, and {flag(entry.name)} was {was}, not "
                    f"{value}; leave it out, or start a new run"
                )
    dense: Any = 0 if isinstance(recorded, FinetuneConfig) else recorded.prune.dense_steps
    steps = sections["run"].steps
    if dense != AUTO and steps != AUTO and steps <= dense:
        raise ConfigError(
            f"--steps {steps:,} ends in the run's dense phase of {counted(dense, 'step')}, which "
            "it keeps; raise it, or leave it out"
        )
    if sections["run"].wandb is not None and not is_installed("wandb"):
        _log.warning("W&B gets no events: its package wandb is not installed here")
        sections["run"] = replace(sections["run"], wandb=None)
    return resolve(KINDS[recorded.kind](**sections))


# Single settings


def resolve_sparsity(sparsity: float, pattern: str | None) -> float:
    """Return the sparsity; "auto" is that of the pattern, or the default."""
    if pattern is None:
        return _given(sparsity, DEFAULT_SPARSITY)
    try:
        return pattern_sparsity(parse_pattern(pattern), _given(sparsity, None))
    except ValueError as error:
        raise ConfigError(f"--{error}") from None  # "pattern must be ..."


def gpt_config(model: ModelConfig, vocab_size: int) -> GPTConfig:
    """Return the shape of the model."""
    return GPTConfig(
        **{name: getattr(model, name) for name in _SIZES},
        vocab_size=vocab_size,
        is_tied=model.tied,
        is_checkpointed=bool(model.checkpointing),
    )


def device_and_dtype(wanted: str) -> dict[str, Any]:
    """Return the device that is wanted, and its usual dtype."""
    import torch  # here, so that help does not load it

    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("--device cuda needs a GPU that torch can use; this machine has none")
    if wanted == "cpu" or not has_cuda:
        return {"device": "cpu", "dtype": "float32"}
    return {"device": "cuda", "dtype": "bfloat16" if torch.cuda.is_bf16_supported() else "float16"}


def weights_of(value: str | int) -> Weights:
    """Return "resident", "streamed", or a number of bytes, of which "4GB" is one."""
    if value in ("resident", "streamed") or (isinstance(value, int) and value >= 0):
        return value  # type: ignore[return-value]
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?) ?([kmgt]?)b", str(value).lower())
    if found is None:
        raise ConfigError(
            "--weights must be auto, resident, streamed, or an amount of memory such as 4GB or "
            f"500MB, got {str(value)[:40]!r}"
        )
    return round(float(found[1]) * 1000 ** " kmgt".index(found[2] or " "))


def filled(section: Any, defaults: Mapping[str, Any]) -> Any:
    """Return a section with defaults for "auto" and None, and with values as a run uses them."""
    values = {}
    for entry in fields(section):
        value = getattr(section, entry.name)
        if entry.name in defaults and value in (AUTO, None):
            value = defaults[entry.name]
        elif entry.name == "dtype":
            value = DTYPES.get(value, value)
        elif entry.name == "weights" and value != AUTO:
            value = weights_of(value)
        values[entry.name] = _absolute(value)
    return type(section)(**values)


def _absolute(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_absolute, value))
    return value.absolute() if isinstance(value, Path) else value


def _given(value: Any, default: Any) -> Any:
    return default if value == AUTO else value
