"""``samo bench``: measure, show the table, and write rows and page to a folder."""

import datetime
import importlib
import re
import sys
from functools import partial
from pathlib import Path

import torch

from samo.bench.rows import Results, Row, failures
from samo.bench.settings import QUESTIONS, StepConfig
from samo.cli.commands import Bench
from samo.cli.console import PatientConsole, columns, say
from samo.errors import RunError
from samo.train.launch_env import command_line
from samo.train.resolve import device_and_dtype
from samo.train.run_dir import check_free, free_dir
from samo.utils.environment import hardware


def run(command: Bench) -> int:
    """Measure, and print the results."""
    config = command.question
    name = QUESTIONS[type(config)]
    question = importlib.import_module(f"samo.bench.{name}")
    if isinstance(config, StepConfig):
        question.contenders(config)  # refuses unknown names before anything is written
    device = torch.device(device_and_dtype(config.device)["device"])
    console = PatientConsole(width=None if sys.stdout.isatty() else 140)  # rich would wrap at 80
    out = config.out or _default_folder(name, device)
    check_free(out)
    results = Results(
        out,
        name=name,
        command=command_line(),
        device=device,
        tabulate=question.tabulate,
        notes=["docs/benchmarks.md explains every column."],
    )
    rows: list[Row] = question.measure(config, device, results.save, partial(say, console))
    missing = failures(rows)
    if missing and all(row.median is None for row in rows):
        raise RunError(
            f"nothing could be measured: {'; '.join(missing)}; rows are in '{out}', choose smaller "
            "sizes or other contenders"
        )
    table = question.tabulate(rows)
    shown = columns(*table.head)
    shown.columns[0].no_wrap = True
    for line in table.lines:
        shown.add_row(*line)
    console.print(shown)
    for entry in missing:
        say(console, f"not measured: {entry}")
    say(console, f"rows and table: {out}")
    return 0


def _default_folder(name: str, device: torch.device) -> Path:
    today = datetime.date.today().isoformat()
    machine = re.sub(r"[^a-z0-9]+", "-", hardware(device)["device_name"].lower()).strip("-")
    return free_dir(Path("benchmarks") / "results", f"{name}-{machine}-{today}")
