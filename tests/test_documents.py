"""The documents are true of the code: settings, events, sizes, commands.

What stands between two marks is generated: ``python -m tests.test_documents`` rewrites it.
"""

import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

import pytest
import torch
from torch import nn

import samo
from samo.cli.commands import COMMANDS as CLI_COMMANDS, Train
from samo.cli.main import parse
from samo.memory.predict import TensorSpec, dense_bytes, total
from samo.models.gpt import GPT
from samo.models.shapes import SHAPES, GPTConfig
from samo.train import events, run_dir
from samo.train.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from samo.train.config_io import read_toml
from samo.train.resolve import CHANGEABLE
from samo.train.trainer import train
from samo.utils.formatting import size

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs"
COMMANDS: Final = ("demo", "train", "launch", "prune", "inspect", "report", "bench")
GPT2_VOCABULARY: Final = 50_257
PAGES: Final = sorted([ROOT / "README.md", ROOT / "screenshots" / "README.md", *DOCS.rglob("*.md")])

# What is generated


def size_table() -> str:
    """Return the shapes with their parameters, and the bytes of their state."""
    rows = [
        "| `--shape` | blocks x width, context | parameters | dense, float32 | samo, float32 | samo, bfloat16 |",
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
    return sum(map(dense_bytes, specs)), sum(total(specs).values())


def in_words(count: int) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


GENERATED: Final[dict[str, dict[str, Callable[[], str]]]] = {
    "training.md": {"shapes and sizes": size_table},
}
"""Page, to the name in its marks, to what stands between them."""


def rewritten(text: str, name: str, content: str) -> str:
    """Return a page with other content between the marks of this name."""
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
    text, count = re.subn(pattern, lambda m: f"{m[1]}\n{content}\n\n{m[2]}", text, flags=re.DOTALL)
    assert count == 1, f"{count} marks '{name}' on the page"
    return text


@pytest.mark.parametrize(
    ("page", "name"), [(page, n) for page, ns in GENERATED.items() for n in ns]
)
def test_what_is_generated_is_up_to_date(page: str, name: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    again = rewritten(text, name, GENERATED[page][name]())
    assert text == again, "run python -m tests.test_documents"


def test_the_table_of_sizes_agrees_with_a_real_model() -> None:
    model = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=32))
    predicted = state_bytes(model, "float32")
    samo.compress_(model, samo.prune(model, 0.9))
    opt = samo.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    opt.step()
    account = samo.ledger(model, opt)
    assert predicted == (account.dense_bytes, account.measured_bytes)


# Commands that stand in the documents


def command_lines(text: str) -> Iterator[str]:
    """Yield the lines of a page that a reader types: ``samo ...``, in blocks."""
    text = text.replace("\\\n", " ")
    for line in re.findall(r"^(?: {4}|\$ )((?:\.venv/bin/)?samo .*)$", text, re.MULTILINE):
        yield line.partition("  #")[0].strip()


def test_command_lines_are_found() -> None:
    text = "Say samo train:\n\n    samo train a.txt \\\n        --steps 5  # five\n    $ samo\n\n$ samo demo\n"
    assert [shlex.split(line) for line in command_lines(text)] == [
        ["samo", "train", "a.txt", "--steps", "5"],
        ["samo", "demo"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_can_be_typed(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in command_lines(page.read_text(encoding="utf-8")):
        code: object = 0
        if line != "samo --version":  # which main answers, before anything is parsed
            try:
                with mock.patch("samo.cli.main._train_defaults", return_value=Train()):
                    parse(shlex.split(line)[1:])
            except SystemExit as error:
                code = error.code
        assert code == 0, f"{line}\n{capsys.readouterr().err}"


def test_the_page_of_commands_has_them_all() -> None:
    text = section_of("training.md", "Commands")
    assert re.findall(r"^\| `samo (\w+)`", text, re.MULTILINE) == list(COMMANDS)
    assert {*CLI_COMMANDS} == set(COMMANDS)


# The config file


def test_the_example_of_a_config_file_is_read(tmp_path: Path) -> None:
    (block,) = re.findall(
        r"^```toml\n(.*?)^```$", (DOCS / "training.md").read_text("utf-8"), re.M | re.S
    )
    path = tmp_path / "notes.toml"
    path.write_text(block, encoding="utf-8")
    config = read_toml(path)
    assert config.data.train == (tmp_path / "notes.txt",)
    assert (config.prune.method, config.run.steps) == ("early-bird", 4000)


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["train", "--help"])
    named = set(re.findall(r"--([\w-]+)", capsys.readouterr().out))
    for section in dataclasses.fields(TrainConfig):
        settings = {field.name for field in dataclasses.fields(typing.cast(Any, section.type))}
        assert {name.replace("_", "-") for name in settings - {"train"}} <= named


def test_the_page_lists_what_may_change_when_a_run_goes_on() -> None:
    text = section_of("training.md", "What may change with --resume")
    named = re.findall(r"`(?:--)?([\w-]+)`", text)
    names = {name.replace("_", "-") for name in CHANGEABLE}
    assert sorted(named) == sorted("TEXT" if name == "train" else name for name in names)


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


@pytest.mark.parametrize(("kind", "name"), events.NAMES.items(), ids=events.NAMES.values())
def test_the_page_explains_every_field_of_an_event(kind: type[events.Event], name: str) -> None:
    hints = typing.get_type_hints(kind)
    common = fields_of(section_of("metrics.md", "What every line has"))
    assert common == {"event": "text", "step": described(hints.pop("step"))}
    hints = {field.name: hints[field.name] for field in dataclasses.fields(kind)[1:]}
    assert fields_of(section_of("metrics.md", name)) == {n: described(h) for n, h in hints.items()}


def test_the_page_explains_no_event_that_does_not_exist() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == list(events.NAMES.values())


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


# What stands in decision 10


def test_importing_samo_loads_nothing_of_the_command_line() -> None:
    code = "import sys, samo; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"tyro", "rich", "matplotlib", "torch"} & set(done.stdout.split())


def test_help_loads_neither_torch_nor_what_draws() -> None:
    code = "import sys, samo.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"rich", "matplotlib", "torch"} & set(done.stdout.split())


# The pictures


def test_a_line_of_a_terminal_becomes_html() -> None:
    make = importlib.import_module("screenshots.make")
    plain = {"fg": "default", "bold": False}
    line = [types.SimpleNamespace(data=letter, **plain) for letter in "a<"]
    line += [types.SimpleNamespace(data=letter, fg="brightgreen", bold=True) for letter in "ok"]
    line += [types.SimpleNamespace(data="x", fg="729c1f", bold=False)]
    line += [types.SimpleNamespace(data=" ", **plain)] * 3
    assert make.row(line) == (
        'a&lt;<span style="color:#7ee787;font-weight:bold">ok</span><span style="color:#729c1f">x</span>'
    )


@pytest.mark.parametrize("name", ["terminal.png", "report.png"])
def test_a_picture_is_small_enough_to_be_committed(name: str) -> None:
    make = importlib.import_module("screenshots.make")
    assert (ROOT / "screenshots" / name).stat().st_size <= make.MAX_BYTES


if __name__ == "__main__":
    for page, parts in GENERATED.items():
        text = (DOCS / page).read_text(encoding="utf-8")
        for name, make in parts.items():
            text = rewritten(text, name, make())
        (DOCS / page).write_text(text, encoding="utf-8")
