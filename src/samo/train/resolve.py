"""From `TrainConfig` to `ResolvedConfig`: fill in "auto", for a new run or a resumed one."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from samo.errors import ConfigError
from samo.models.shapes import SHAPES, GPTConfig
from samo.pruning.densities import parse_pattern, pattern_sparsity
from samo.train.config import (
    Auto,
    DType,
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
from samo.train.config_rules import CHANGING, DEFAULT_SPARSITY, MOVING, check

__all__ = ["resolve"]

Section = TypeVar("Section")
Config = TypeVar("Config", bound=TrainConfig)
Number = TypeVar("Number", int, float)

_HISTORY_WEIGHTS: Final = 30_000_000
"""Largest model whose masks are all held by default, which takes about 200 MB."""

CHANGEABLE: Final = frozenset(
    [
        *(f"run.{name}" for name in ("steps", "eval_every", "eval_batches", "save_every")),
        *(f"run.{name}" for name in ("save_errors", "log_every", "sample_tokens")),
        *(f"run.{name}" for name in ("weights", "compile")),
        *("data.train", "data.valid"),
        *(f"mesh.{entry.name}" for entry in fields(MeshConfig)),
    ]
)
"""Settings that a resumed run may change: how long, how often, on which ranks, how weights are held and
computed with, and where the text is."""


def resolve(config: TrainConfig) -> ResolvedConfig:
    """Return the settings with every "auto" replaced, and with absolute paths.

    Example:
        >>> from pathlib import Path
        >>> from samo.train.config import DataConfig, TrainConfig
        >>> from samo.train.resolve import resolve
        >>> resolve(TrainConfig(data=DataConfig(train=(Path("notes.txt"),)))).prune.dense_steps
        200

    Raises:
        ConfigError: A setting is out of range, contradicts another, or needs a GPU that is not
            there.
    """
    model, prune, optim, run = config.model, config.prune, config.optim, config.run
    shape, is_dense = SHAPES[model.shape], run.mode == "dense"
    num_layers, width = _or(model.num_layers, shape.num_layers), _or(model.width, shape.width)
    warmup_steps = _or(optim.warmup_steps, min(run.steps // 20, 1000))
    dense_steps, mask_every, mask_stop = _mask_steps(config, warmup_steps)
    with_history = prune.method == "early-bird" and 12 * num_layers * width**2 <= _HISTORY_WEIGHTS
    device, dtype = _device_and_dtype(run)
    resolved = ResolvedConfig(
        data=config.data,
        mesh=config.mesh,
        model=_with(
            ResolvedModel,
            model,
            num_layers=num_layers,
            width=width,
            num_heads=_or(model.num_heads, shape.num_heads),
            context=_or(model.context, shape.context),
        ),
        prune=_with(
            ResolvedPrune,
            prune,
            sparsity=resolve_sparsity(prune.sparsity, prune.pattern),
            dense_steps=dense_steps,
            mask_every=mask_every,
            mask_stop=mask_stop,
            history=prune.history if isinstance(prune.history, bool) else with_history,
        ),
        optim=_with(
            ResolvedOptim,
            optim,
            lr=_or(optim.lr, shape.lr),
            warmup_steps=warmup_steps,
            density_power=_or(
                optim.density_power, 0.0 if is_dense or model.init is not None else -1.0
            ),
        ),
        run=_with(
            ResolvedRun,
            run,
            device=device,
            dtype=dtype,
            weights=_weights(run.weights, is_sharded=config.mesh.shard == "weights"),
            # Compiled blocks were not faster anywhere so far: 336 ms a step on an H200 where eager
            # ones took 298 (2.7B parameters, 8 x 1024 tokens, torch 2.11, 2026-11).
            compile=bool(run.compile),
        ),
    )
    check(resolved)
    return _with_absolute_paths(resolved)


def resolve_resumed(recorded: ResolvedConfig, wanted: TrainConfig) -> ResolvedConfig:
    """Return the settings of a resumed run: "auto" means as recorded."""
    sections = {}
    for section in fields(TrainConfig):
        before, after = getattr(recorded, section.name), getattr(wanted, section.name)
        values = {entry.name: getattr(after, entry.name) for entry in fields(after)}
        if section.name != "mesh":
            autos = [name for name, value in values.items() if value in ("auto", None)]
            values |= {name: getattr(before, name) for name in autos}
        elif values["pipe"] == 1:  # recorded settings of stages are without use now
            for name in ("micro_batches", "stages_per_rank"):
                if values[name] == getattr(before, name):
                    values[name] = getattr(MeshConfig(), name)
        sections[section.name] = type(after)(**values)
    config = _with_absolute_paths(TrainConfig(**sections))
    for key, (old, new) in changes(recorded, config).items():
        if key not in CHANGEABLE:
            names = sorted(key.partition(".")[2] for key in CHANGEABLE - {"data.train"})
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise ConfigError(
                f"a resumed run keeps its settings, and {key} was {old!r}, not {new!r}; leave it out, or "
                f"start a new run. These may change: {flags}, and the location of the text"
            )
    return resolve(config)


def changes(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ: section.key to (old, new).

    Example:
        >>> from samo.train.config import RunConfig, TrainConfig
        >>> from samo.train.resolve import changes
        >>> changes(TrainConfig(), TrainConfig(run=RunConfig(steps=5)))
        {'run.steps': (1000, 5)}
    """
    return {
        f"{section.name}.{entry.name}": (before, after)
        for section in fields(TrainConfig)
        for entry in fields(getattr(new, section.name))
        if (before := getattr(getattr(old, section.name), entry.name))
        != (after := getattr(getattr(new, section.name), entry.name))
    }


def resolve_sparsity(sparsity: float | Auto, pattern: str | None) -> float:
    """Return the sparsity; "auto" is that of the pattern, or the default."""
    if pattern is None:
        return _or(sparsity, DEFAULT_SPARSITY)
    try:
        given = None if isinstance(sparsity, str) else sparsity
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


def _mask_steps(config: TrainConfig, warmup_steps: int) -> tuple[int, int, int]:
    """Return dense_steps, mask_every and mask_stop."""
    prune, steps = config.prune, config.run.steps
    method = "none" if config.run.mode == "dense" else prune.method
    is_trained = config.model.init is not None or prune.masks is not None
    dense = 0 if method in ("none", *MOVING) or is_trained else steps // 5
    dense = _or(prune.dense_steps, steps // 2 if method == "early-bird" else dense)
    every = stop = 0
    if method == "early-bird":
        # Masks one step apart are always close: at least 5 steps, if the dense phase has room for
        # them.
        room = (dense - warmup_steps) // max(prune.queue, 1)
        every = max(1, min(max(steps // 200, 5), room))
    elif method in CHANGING:
        every = max(1, min(steps // 40, 100))
        stop = dense + max(1, 3 * (steps - dense) // 4)
    return dense, _or(prune.mask_every, every), _or(prune.mask_stop, stop)


def _device_and_dtype(run: RunConfig) -> tuple[Literal["cpu", "cuda"], DType]:
    import torch  # here, so that help does not load it

    has_cuda = torch.cuda.is_available()
    if run.device == "cuda" and not has_cuda:
        raise ConfigError(
            "--device cuda needs a GPU that torch can use, and this machine has none; leave it out to "
            "train on the CPU"
        )
    device: Literal["cpu", "cuda"] = "cuda" if has_cuda and run.device != "cpu" else "cpu"
    if run.dtype != "auto":
        return device, run.dtype
    if device == "cpu":
        return device, "float32"
    return device, "bfloat16" if torch.cuda.is_bf16_supported() else "float16"


_AMOUNT: Final = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*(?:([kmgt]?)(i?)b)?", re.IGNORECASE)


def _weights(value: str | int, *, is_sharded: bool) -> Weights:
    """Return "resident", "streamed", or a number of bytes; sharded weights are always streamed."""
    if value == "resident":
        return "streamed" if is_sharded else "resident"
    if value == "streamed":
        return "streamed"
    found = _AMOUNT.fullmatch(str(value).strip())
    size = -1.0 if found is None else float(found[1].replace("_", ""))
    if found is not None and found[2]:
        power = "kmgt".index(found[2].lower()) + 1
        size *= (1024 if found[3] else 1000) ** power
    if not 0 <= size < 2**63:
        raise ConfigError(
            f"--weights must be resident, streamed, or an amount of memory for dense weights, got "
            f"{str(value)[:40]!r}; write it as 4GB or 500MB, where GB is 10^9 bytes"
        )
    return round(size)


def _or(value: Number | Auto, default: Number) -> Number:
    return default if isinstance(value, str) else value


def _with(kind: type[Section], section: Any, **values: Any) -> Section:
    return kind(**{entry.name: getattr(section, entry.name) for entry in fields(section)} | values)


def _with_absolute_paths(config: Config) -> Config:
    def absolute(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(absolute, value))
        return value.absolute() if isinstance(value, Path) else value

    sections = {entry.name: getattr(config, entry.name) for entry in fields(config)}
    return replace(
        config,
        **{
            name: replace(
                section,
                **{entry.name: absolute(getattr(section, entry.name)) for entry in fields(section)},
            )
            for name, section in sections.items()
        },
    )
