"""``samo demo``: samo on a laptop, on text that every machine has.

Two runs on the source code of Python's standard library: one is pruned and trained with samo, the
other stays dense. All numbers are measured in these runs.
"""

import time
from pathlib import Path
from typing import Final

from rich.console import Console

from samo.cli.commands import Demo, Train
from samo.cli.console import PatientConsole, columns, say, show_sample
from samo.cli.display import Display
from samo.cli.main import parse
from samo.data.standard_library import write_library_text
from samo.report.findings import NUMBERS
from samo.report.page import write_report
from samo.report.runs import read_run
from samo.train.config import Mode
from samo.train.run_dir import check_free, free_dir
from samo.train.trainer import Result, train
from samo.utils.formatting import duration

STEPS: Final = 600
DENSE_STEPS: Final = 200
TITLES: Final[dict[Mode, str]] = {"samo": "samo", "dense": "dense, not pruned"}
_SHOWN: Final = ("validation loss", "model state", "saved against dense", "tokens/s")


def run(command: Demo) -> int:
    """Train twice, and compare."""
    console = PatientConsole()
    out = command.out or free_dir(Path("runs"), "demo")
    check_free(out)
    text = write_library_text(out / "text")
    console.print(
        f"A GPT with 0.9 million parameters learns the source code of Python's standard library: "
        f"{DENSE_STEPS} dense steps, then 90 % of its weights are pruned, then "
        f"{STEPS - DENSE_STEPS} more. Then again without pruning, for comparison.\n",
        highlight=False,
    )
    began = time.monotonic()
    results: dict[Mode, Result] = {}
    with Display(console) as display:
        for number, mode in enumerate(TITLES, start=1):
            display.title = mode
            spent = duration(time.monotonic() - began)
            when = f", about as long as the first: {spent}" if results else ""
            say(console, f"run {number} of {len(TITLES)}: {TITLES[mode]}{when}")
            result = results[mode] = train(_config(mode, *text), out / mode, listeners=[display])
            if result.signal is not None:
                say(console, "interrupted")
                return 128 + result.signal
    page = write_report([out / mode for mode in TITLES], out / "report.html")
    _show(console, results)
    took = duration(time.monotonic() - began)
    say(console, f"\nThis took {took}. The report, with curves: {page}")
    say(console, "Now your own text: samo train notes.txt")
    return 0


def _config(mode: Mode, training: Path, validation: Path) -> Train:
    dense_steps, sample_tokens = (DENSE_STEPS, 240) if mode == "samo" else (0, 0)
    flags = (
        f"--mode {mode} --shape tiny --steps {STEPS} --dense-steps {dense_steps} --batch-size 8 "
        f"--warmup-steps 30 --eval-every 100 --eval-batches 10 --save-every {STEPS} --log-every 5 "
        f"--sample-tokens {sample_tokens} --device cpu"
    )
    config = parse(["train", str(training), "--valid", str(validation), *flags.split()])
    assert isinstance(config, Train)
    return config


def _show(console: Console, results: dict[Mode, Result]) -> None:
    say(console, "\nThe bytes of samo's model state, measured and predicted:\n")
    console.print(str(results["samo"].ledger), highlight=False)
    table = columns("run", *_SHOWN)
    runs = {mode: read_run(result.folder) for mode, result in results.items()}
    for mode, run in runs.items():
        table.add_row(TITLES[mode], *(NUMBERS[name](run) for name in _SHOWN))
    console.print()
    console.print(table)
    show_sample(console, runs["samo"])
