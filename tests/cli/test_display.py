"""The display of a run: its lines and its bar; methods of pruning in whole commands."""

import io
import time
from pathlib import Path

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
def test_the_line_of_the_draw_says_why(event: events.Pruned, words: str) -> None:
    assert words in shown(event)


def test_lines_of_steps_say_how_masks_stand() -> None:
    about = {"threshold": 0.1, "queue": 5}
    seen = events.Observed(step=50, distances=[0.3, 0.2], largest=0.3, **about)  # type: ignore[arg-type]
    assert "loss 2.000  masks differ by 0.300  9 tokens/s" in shown(seen, step_line(100))
    assert "masks" not in shown(seen, pruned("dense_steps"), step_line(100)).splitlines()[-1]
    sizes = {"step": 60, "numel": 100}
    fewer = events.Remapped(**sizes, kept=40, sparsity=0.6, dropped=20, grown=0)
    assert "loss 2.000  60.0% pruned  9 tokens/s" in shown(fewer, step_line(100))
    moved = events.Remapped(**sizes, kept=40, sparsity=0.6, dropped=10, grown=10)
    assert "loss 2.000  25.0% replaced  9 tokens/s" in shown(moved, step_line(100))


def account(step: int, *rank_bytes: int) -> events.Accounted:
    sums = dict.fromkeys(("num_params", "predicted_bytes", "dense_bytes"), 1)
    return events.Accounted(
        step=step,
        measured_bytes=sum(rank_bytes),
        paper_bytes=None,
        measured={},
        predicted={},
        weights=None,
        rank_bytes=[*rank_bytes],
        **sums,
    )


def moved(step: int) -> events.Remapped:
    return events.Remapped(step=step, kept=10, numel=100, sparsity=0.9, dropped=1, grown=1)


def numbers_of(*happened: events.Event) -> str:
    """Return what a step's line says at the end of a run, where all lines are shown."""
    return shown(*happened, step_line(100)).splitlines()[-1]


def test_replaced_weights_are_shown_once_after_a_change() -> None:
    happened = [pruned("dense_steps"), moved(60)]
    assert "10.0% replaced" in numbers_of(*happened)
    assert "replaced" not in numbers_of(*happened, step_line(80))


def test_state_is_that_of_the_phase_and_of_the_first_rank() -> None:
    assert "state 40.0 kB of 0 B in all  left" in numbers_of(account(1, 40_000))
    assert "state 30.0 kB of 0 B in all on the first rank" in numbers_of(account(1, 30_000, 50_000))
    assert "state" not in numbers_of(account(1, 40_000), pruned("dense_steps"))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_warmup_of_compiled_blocks_is_named(is_terminal: bool) -> None:
    out = io.StringIO()
    with Display(Console(file=out, width=120, force_terminal=is_terminal)) as display:
        display.on(events.Started(step=0, steps=9, time=0.0))
        display.on(events.Compiling(step=0))
        if is_terminal:
            time.sleep(0.2)  # until the bar is drawn again
        assert "compiling" in out.getvalue()
        display.on(events.Compiled(step=1, seconds=12.34))
    assert "step 1/9  compiled in 12.3 s" in out.getvalue()


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
