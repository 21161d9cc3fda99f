"""The documents agree with the code: settings, events, sizes, commands."""

import dataclasses
import importlib
import json
import re
import shlex
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

import pytest
import torch
from torch import nn

import samo
from samo.cli.commands import COMMANDS
from samo.cli.main import parse
from samo.memory.predict import TensorSpec, total
from samo.models.gpt import GPT
from samo.models.shapes import SHAPES, GPTConfig
from samo.train import events, run_dir
from samo.train.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from samo.train.config_io import read_toml
from samo.train.resolve import CHANGEABLE
from samo.train.rules import flag
from samo.train.trainer import train
from samo.utils.formatting import size

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs"
GPT2_VOCABULARY: Final = 50_257
PAGES: Final = sorted([ROOT / "README.md", ROOT / "screenshots" / "README.md", *DOCS.rglob("*.md")])


def size_table() -> str:
    """Return the shapes with their parameters, and the bytes of their state."""
    rows = [
        "| `--shape` | blocks x width, context | parameters "
        "| dense, float32 | samo, float32 | samo, bfloat16 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, shape in SHAPES.items():
        is_large = name.startswith("gpt3")
        config = GPTConfig(
            num_layers=shape.num_layers,
            width=shape.width,
            num_heads=shape.num_heads,
            context=shape.context,
            vocab_size=GPT2_VOCABULARY if is_large else 256,
            is_tied=is_large,
        )
        with torch.device("meta"):  # shapes without memory
            model = GPT(config)
        dense, single = state_bytes(model, "float32")
        _, half = state_bytes(model, "bfloat16")
        rows.append(
            f"| `{name}` | {shape.num_layers} x {shape.width:,}, {shape.context:,} "
            f"| {in_words(sum(param.numel() for param in model.parameters()))} "
            f"| {size(dense)} | {size(single)} | {size(half)} |"
        )
    return "\n".join(rows)


def state_bytes(model: nn.Module, dtype: str) -> tuple[int, int]:
    """Return the bytes of dense training, and of samo at 90 %."""
    pruned = set(samo.prunable(model))
    specs = [
        TensorSpec(
            numel=param.numel(),
            kept=round(0.1 * param.numel()) if name in pruned else None,
            dtype=dtype,
            grad_dtype=dtype,
        )
        for name, param in model.named_parameters()
    ]
    return sum(total(specs, "dense").values()), sum(total(specs).values())


def in_words(count: int) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def test_the_table_of_sizes_is_up_to_date() -> None:
    text = (DOCS / "training.md").read_text(encoding="utf-8")
    assert size_table() in text, f"write into docs/training.md:\n{size_table()}"


# Commands that stand in the documents


def command_lines(text: str) -> Iterator[str]:
    """Yield the lines of a page that a reader types: ``samo ...``, in blocks."""
    text = text.replace("\\\n", " ")
    for line in re.findall(r"^(?: {4}|\$ )((?:\.venv/bin/)?samo .*)$", text, re.MULTILINE):
        yield line.partition("  #")[0].strip()


def test_commands_in_the_documents_can_be_typed() -> None:
    lines = [line for page in PAGES for line in command_lines(page.read_text(encoding="utf-8"))]
    assert len(lines) > 20
    for line in {*lines} - {"samo --version"}:  # which main answers, before anything is parsed
        with mock.patch("samo.cli.main._run_defaults", lambda kind, _: kind()):
            assert parse(shlex.split(line)[1:]) is not None, line


def test_the_page_of_commands_has_them_all() -> None:
    text = section_of("training.md", "Commands")
    assert re.findall(r"^\| `samo (\w+)`", text, re.MULTILINE) == list(COMMANDS)


# The config file


def test_the_example_of_a_config_file_is_read(tmp_path: Path) -> None:
    text = (DOCS / "training.md").read_text("utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```$", text, re.M | re.S)
    path = tmp_path / "notes.toml"
    path.write_text(block, encoding="utf-8")
    config = read_toml(path)
    assert config.data.train == (tmp_path / "notes.txt",)
    assert (config.prune.method, config.run.steps) == ("early-bird", 4000)


def test_the_page_lists_what_may_change_when_a_run_goes_on() -> None:
    text = section_of("training.md", "What may change with --resume")
    names = {"TEXT" if name == "--train" else name for name in map(flag, CHANGEABLE)}
    assert {*re.findall(r"`([\w-]+)`", text)} == names - {"--planned", "--reason"}  # no flags


# Run folders


def section_of(page: str, title: str) -> str:
    """Return what stands under a heading, up to the next one of any level."""
    text = (DOCS / page).read_text(encoding="utf-8")
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"{page} has no heading '{title}'"
    return match[1]


def fields_of(text: str) -> dict[str, str]:
    """Return the types of the fields that a text lists, as in "- `step` (integer): so many"."""
    return dict(re.findall(r"^- `([\w.]+)` \(([^)]+)\): ", text, re.MULTILINE))


def described(hint: Any) -> str:
    """Return what the page calls a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return " or ".join(map(described, arguments))
    if origin is Literal:
        return "text"
    names = {int: "integer", float: "number", str: "text", type(None): "null"}
    return names.get(hint) or {dict: "object", list: "list"}[origin]


def test_the_page_explains_every_event() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == list(events.NAMES.values())
    common = fields_of(section_of("metrics.md", "What every line has"))
    assert common == {"event": "text", "step": "integer"}
    for kind, name in events.NAMES.items():
        hints = typing.get_type_hints(kind)
        fields = [field.name for field in dataclasses.fields(kind)[1:]]
        expected = {field: described(hints[field]) for field in fields}
        assert fields_of(section_of("metrics.md", name)) == expected


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("run")
    (home / "notes.txt").write_text("It rains again, and the fox is glad.\n" * 40)
    config = TrainConfig(
        data=DataConfig(train=(home / "notes.txt",)),
        model=ModelConfig(num_layers=1, width=32, num_heads=2, context=32),
        run=RunConfig(steps=2, batch_size=2, sample_tokens=4, device="cpu"),
    )
    return train(config, home / "run").folder


def test_the_page_explains_every_key_of_the_record_of_a_run(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    found = set(record)
    for part in ("model", "data", "hardware"):
        found |= {f"{part}.{key}" for key in record[part]}
    found -= {"model", "data", "hardware"}
    assert set(fields_of(section_of("metrics.md", "run.json"))) == found


def test_the_page_lists_what_lies_in_a_run_folder(run: Path) -> None:
    pattern = r"^(?: {4})?([a-z]+[\w./]*?)/? {2,}\w"
    listed = re.findall(pattern, section_of("training.md", "The run folder"), re.MULTILINE)
    assert listed == re.findall(pattern, run_dir.__doc__ or "", re.MULTILINE)
    found = {entry.name for entry in run.iterdir()} - {"checkpoints"}
    assert found | {f"checkpoints/{e.name}" for e in (run / "checkpoints").iterdir()} <= {*listed}


def test_pictures_are_small_enough_to_be_committed() -> None:
    make = importlib.import_module("screenshots.make")
    for name in ("terminal.png", "report.png"):
        assert (ROOT / "screenshots" / name).stat().st_size <= make.MAX_BYTES


def test_every_silent_limit_has_its_test() -> None:
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests" / "core").glob("*.py"))
    silent = section_of("limits.md", "Silent")
    named = re.findall(r"`(test_\w+)`", silent)
    assert len(named) == silent.count("\n**")
    assert all(f"def {name}(" in tests for name in named)
