"""The display of a run: its lines and its bar; methods of pruning in whole commands."""

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from samo.cli.display import Display
from samo.cli.main import main
from samo.train import events
from tests.cli.test_cli import SMALL, here

__all__ = ["here"]

BIRD = "--method early-bird --queue 2 --mask-every 1 --warmup-steps 0".split()  # noqa: SIM905


def shown(*happened: events.Event) -> str:
    """Return the lines that a log gets of a run of 100 steps."""
    printed = io.StringIO()
    display = Display(Console(file=printed, width=200))
    for event in (events.Started(step=0, steps=100, time=0.0), *happened):
        display.on(event)
    return printed.getvalue()


def step_line(step: int) -> events.Stepped:
    zeros = dict.fromkeys(("lr", "grad_norm", "epoch", "step_ms", "elapsed_s"), 0.0)
    counts = dict.fromkeys(("tokens", "memory_bytes", "skipped_steps"), 0)
    return events.Stepped(step=step, phase="samo", loss=2.0, tokens_per_s=9.0, **zeros, **counts)


def pruned(reason: events.DrawReason, sparsity: float = 0.9) -> events.Pruned:
    is_bird = reason in ("settled", "limit")
    return events.Pruned(
        step=50,
        kept=round(100 * (1 - sparsity)),
        numel=100,
        sparsity=sparsity,
        reason=reason,
        distances=[0.08, 0.0512] if is_bird else [],
        threshold=0.1 if is_bird else None,
    )


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (pruned("dense_steps"), "pruned 90.0%: 10 of 100 weights kept\n"),
        (pruned("settled"), "kept; masks have settled: distances 0.080, 0.051, threshold 0.1\n"),
        (pruned("limit"), "kept; limit reached, masks not settled: distances 0.080, 0.051, thresh"),
        (pruned("dense_steps", 0.0), "compressed; 100 weights will be pruned step by step"),
    ],
)
def test_the_line_about_pruning_says_why(event: events.Pruned, words: str) -> None:
    assert words in shown(event)


def account(*rank_bytes: int) -> events.Accounted:
    zeros: Any = dict.fromkeys(
        ("num_params", "measured_bytes", "predicted_bytes", "dense_bytes"), 0
    )
    rest: Any = {"paper_bytes": None, "measured": {}, "predicted": {}, "weights": None}
    return events.Accounted(step=1, rank_bytes=[*rank_bytes], **zeros, **rest)


def remapped(dropped: int, grown: int) -> events.Remapped:
    sizes: Any = {"kept": 40, "numel": 100, "sparsity": 0.6}
    return events.Remapped(step=60, dropped=dropped, grown=grown, **sizes)


def numbers_of(*happened: events.Event) -> str:
    """Return what a step's line says at the end of a run, where all lines are shown."""
    return shown(*happened, step_line(100)).splitlines()[-1]


def test_lines_of_steps_show_the_masks_and_the_state() -> None:
    about: Any = {"distances": [0.3], "largest": 0.3, "threshold": 0.1, "queue": 5}
    seen = events.Observed(step=50, **about)
    assert "loss 2.000  masks differ by 0.300  9 tokens/s" in numbers_of(seen)
    assert "masks" not in numbers_of(seen, pruned("dense_steps"))
    assert "loss 2.000  60.0% pruned  9 tokens/s" in numbers_of(remapped(20, 0))
    assert "loss 2.000  25.0% replaced  9 tokens/s" in numbers_of(remapped(10, 10))
    assert "replaced" not in numbers_of(remapped(10, 10), step_line(80)), "shown once"
    assert "state 40.0 kB of 0 B in all  left" in numbers_of(account(40_000))
    assert "state 30.0 kB of 0 B in all on the first rank" in numbers_of(account(30_000, 50_000))
    assert "state" not in numbers_of(account(40_000), pruned("dense_steps"))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_warmup_of_compiled_blocks_is_named(is_terminal: bool) -> None:
    out = io.StringIO()
    with Display(Console(file=out, width=120, force_terminal=is_terminal)) as display:
        display.on(events.Started(step=0, steps=9, time=0.0))
        display.on(events.Compiling(step=0))
        if is_terminal:
            time.sleep(0.2)  # until the bar is drawn again
        assert "compiling" in out.getvalue()


def test_a_ticket_is_drawn_reported_and_looked_into(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "notes.txt", *SMALL, *BIRD, "--threshold", "0.9"]) == 0
    assert "masks have settled: distances 0." in capsys.readouterr().out
    page = (here / "runs" / "notes" / "report.html").read_text(encoding="utf-8")
    assert "Masks settled at step 2: distance 0." in page
    assert main(["inspect", "runs/notes"]) == 0
    looked = " ".join(capsys.readouterr().out.split())
    assert "early-bird Masks settled at step 2: distance 0." in looked


def test_moving_masks_are_trained_reported_and_looked_into(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moving = ["--method", "rigl", "--mask-every", "2", "--mask-stop", "6", "--scope", "erk"]
    assert main(["train", "notes.txt", *SMALL, *moving]) == 0
    assert main(["train", "--resume", "runs/notes", "--steps", "8"]) == 0
    assert main(["inspect", "runs/notes"]) == 0
    assert "masks Masks changed 2 times, replacing" in " ".join(capsys.readouterr().out.split())
    assert "Changing masks" in (here / "runs" / "notes" / "report.html").read_text("utf-8")
