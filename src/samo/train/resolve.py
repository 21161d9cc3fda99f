"""From `TrainConfig` to `ResolvedConfig`: fill in "auto", for a new run or a resumed one."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from samo.errors import ConfigError
from samo.models.shapes import SHAPES, GPTConfig
from samo.pruning.densities import parse_pattern, pattern_sparsity
from samo.train.config import (
    Auto,
    DataConfig,
    MeshConfig,
    ResolvedConfig,
    ResolvedModel,
    ResolvedOptim,
    ResolvedPrune,
    ResolvedRun,
    RunConfig,
    TrainConfig,
    Weights,
)
from samo.train.config_rules import CHANGING, DEFAULT_SPARSITY, MOVING, check, check_ranges, flag

__all__ = ["resolve"]

_HISTORY_WEIGHTS: Final = 30_000_000
"""Largest model whose masks are all held by default, which takes about 200 MB."""

CHANGEABLE: Final = frozenset(
    {"steps", "eval_every", "eval_batches", "save_every", "save_errors", "log_every"}
    | {"sample_tokens", "weights", "compile", "train", "valid"}
    | {entry.name for entry in fields(MeshConfig)}
)
"""Settings that a resumed run may change. ``train`` and ``valid`` are where the text is."""


def resolve(config: TrainConfig) -> ResolvedConfig:
    """Return the settings with every "auto" replaced, and with absolute paths.

    Example:
        >>> from pathlib import Path
        >>> from samo.train.config import DataConfig, TrainConfig
        >>> from samo.train.resolve import resolve
        >>> resolve(TrainConfig(data=DataConfig(train=(Path("notes.txt"),)))).prune.dense_steps
        200

    Raises:
        ConfigError: A setting is out of range, conflicts with another, or needs a GPU.
    """
    check_ranges(config)
    prune, steps = config.prune, config.run.steps
    shape, is_dense = SHAPES[config.model.shape], config.run.mode == "dense"
    is_trained = config.model.init is not None
    model = ResolvedModel(
        **_filled(
            config.model,
            num_layers=shape.num_layers,
            width=shape.width,
            num_heads=shape.num_heads,
            context=shape.context,
        )
    )
    optim = ResolvedOptim(
        **_filled(
            config.optim,
            lr=shape.lr,
            warmup_steps=min(steps // 20, 1000),
            density_power=0.0 if is_dense or is_trained else -1.0,
        )
    )
    method = "none" if is_dense else prune.method
    starts_pruned = method in ("none", *MOVING) or is_trained or prune.masks is not None
    dense_steps = 0 if starts_pruned else steps // 5
    if method == "early-bird":
        dense_steps = steps // 2
    dense_steps = dense_steps if isinstance(prune.dense_steps, str) else prune.dense_steps
    mask_every, mask_stop = 1, 0
    if method == "early-bird":
        # Masks one step apart are always close: at least 5 steps, if the dense phase has room.
        room = (dense_steps - optim.warmup_steps) // prune.queue
        mask_every = max(1, min(max(steps // 200, 5), room))
    elif method in CHANGING:
        mask_every = max(1, min(steps // 40, 100))
        mask_stop = dense_steps + max(1, 3 * (steps - dense_steps) // 4)
    is_small = 12 * model.num_layers * model.width**2 <= _HISTORY_WEIGHTS
    resolved = ResolvedConfig(
        data=DataConfig(**_filled(config.data)),
        model=model,
        prune=ResolvedPrune(
            **_filled(
                prune,
                dense_steps=dense_steps,
                mask_every=mask_every,
                mask_stop=mask_stop,
                history=method == "early-bird" and is_small,
            )
            | {"sparsity": resolve_sparsity(prune.sparsity, prune.pattern)}
        ),
        optim=optim,
        # Compiled blocks were not faster anywhere so far: 336 ms a step on an H200 where eager ones
        # took 298 (2.7B parameters, 8 x 1024 tokens, torch 2.11, 2026-11).
        run=ResolvedRun(
            **_filled(config.run, compile=False)
            | _device_and_dtype(config.run)
            | {"weights": _weights(config.run.weights, config.mesh.shard == "weights")}
        ),
        mesh=config.mesh,
    )
    check(resolved)
    return resolved


def resolve_resumed(recorded: ResolvedConfig, wanted: TrainConfig) -> ResolvedConfig:
    """Return the settings of a resumed run: "auto" means as recorded, but for the mesh."""
    sections = {}
    for section in fields(TrainConfig):
        before, after = getattr(recorded, section.name), getattr(wanted, section.name)
        known = {} if section.name == "mesh" else _filled(before)
        values = _filled(after, **known)
        for name, value in values.items():
            if value != getattr(before, name) and name not in CHANGEABLE:
                flags = ", ".join(map(flag, sorted(CHANGEABLE - {"train"})))
                raise ConfigError(
                    f"a resumed run keeps its settings, and {flag(name)} was "
                    f"{getattr(before, name)}, not {value}; leave it out, or start a new run. "
                    f"These may change: {flags}, and the path of the text"
                )
        sections[section.name] = type(after)(**values)
    return resolve(TrainConfig(**sections))


def resolve_sparsity(sparsity: float | Auto, pattern: str | None) -> float:
    """Return the sparsity; "auto" is that of the pattern, or the default."""
    given = None if isinstance(sparsity, str) else sparsity
    if pattern is None:
        return DEFAULT_SPARSITY if given is None else given
    try:
        return pattern_sparsity(parse_pattern(pattern), given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def gpt_config(model: ResolvedModel, vocab_size: int) -> GPTConfig:
    """Return the shape of the model."""
    return GPTConfig(
        num_layers=model.num_layers,
        width=model.width,
        num_heads=model.num_heads,
        context=model.context,
        vocab_size=vocab_size,
        is_tied=model.tied,
        is_checkpointed=model.checkpointing,
    )


def _device_and_dtype(run: RunConfig) -> dict[str, str]:
    import torch  # here, so that help does not load it

    has_cuda = torch.cuda.is_available()
    if run.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda needs a GPU that torch can use; this machine has none")
    device = "cuda" if has_cuda and run.device != "cpu" else "cpu"
    dtype: str = run.dtype
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    elif dtype == "auto":
        dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    return {"device": device, "dtype": dtype}


def _weights(value: str | int, is_sharded: bool) -> Weights:
    """Return "resident", "streamed", or a number of bytes; sharded weights are always streamed."""
    if value == "streamed" or (value == "resident" and is_sharded):
        return "streamed"
    if value == "resident":
        return "resident"
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?) ?(?:([kmgt]?)b)?", str(value).lower())
    if found is None:
        raise ConfigError(
            f"--weights must be resident, streamed, or an amount of memory such as 4GB or 500MB, "
            f"got {str(value)[:40]!r}"
        )
    return round(float(found[1]) * 1000 ** (" kmgt".index(found[2] or " ")))


def _filled(section: Any, **defaults: Any) -> dict[str, Any]:
    """Return the settings of a section, with defaults for "auto" and None, and absolute paths."""

    def absolute(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(absolute, value))
        return value.absolute() if isinstance(value, Path) else value

    values = {entry.name: absolute(getattr(section, entry.name)) for entry in fields(section)}
    return values | {k: v for k, v in defaults.items() if values[k] in ("auto", None)}
