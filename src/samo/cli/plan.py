"""``samo plan``: what fits, with what, how fast; or time this machine."""

import json
import sys
from typing import Any

from samo.cli.commands import Plan
from samo.errors import ConfigError
from samo.models.shapes import GPTConfig
from samo.planner.answer import plan
from samo.planner.network import Network, gpt

_NOTHING_FITS = 3


def run(command: Plan) -> int:
    """Plan, and print it; return 3 if nothing fits."""
    if command.measure is not None:
        from samo.bench.measure_machine import measure  # loads torch

        measure(command.measure, sys.stdout.write)
        return 0
    figure = command.figure
    if figure is not None and figure.suffix not in (".svg", ".png"):
        raise ConfigError(f"--figure writes .svg or .png, got '{figure}'")
    if command.target and {command.num_layers, command.width, command.vocab_size} != {"auto"}:
        raise ConfigError(
            f"'{command.target}' has its own size; leave out --num-layers, --width and "
            "--vocab-size, or the model"
        )
    found = plan(
        command.target or _own(command),
        sparsity=_given(command.sparsity),
        rules=command.rules,
        gpu=command.gpu,
        gpus=command.gpus,
        gpus_per_node=_given(command.gpus_per_node),
        node_gbit=_given(command.node_gbit),
        batch=_given(command.batch),
        context=_given(command.context),
        freeze_embeddings=command.freeze_embeddings,
        teacher=command.teacher or None,
    )
    sys.stdout.write(f"{json.dumps(found.to_dict()) if command.json else found}\n")
    if figure is not None:
        from samo.report.plan_figure import draw  # loads matplotlib

        figure.write_bytes(draw(found, figure.suffix[1:]))
    return 0 if found.best is not None else _NOTHING_FITS


def _given(value: Any) -> Any:
    return None if value == "auto" else value


def _own(command: Plan) -> Network:
    layers, width = _given(command.num_layers), _given(command.width)
    if layers is None or width is None:
        raise ConfigError(
            "name a model to plan for: a Hugging Face folder, a shape such as gpt3-13b, or "
            "--num-layers and --width"
        )
    if layers < 1 or width < 1:
        raise ConfigError(f"--num-layers {layers} and --width {width} must be 1 or more")
    heads = width // 128 if width % 128 == 0 else 1
    config = GPTConfig(
        num_layers=layers,
        width=width,
        num_heads=heads,
        context=_given(command.context) or 2048,
        vocab_size=_given(command.vocab_size) or 50_304,
    )
    flags = f"--num-layers {layers} --width {width} --num-heads {heads}"
    return gpt(config, f"gpt-{layers}x{width}", flags)
