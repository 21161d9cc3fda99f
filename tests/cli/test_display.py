"""The display of a run: its lines and its bar."""

import io

import pytest
import torch
from rich.console import Console

from samo.cli.console import group_table, kind_of, layer_of
from samo.cli.display import Display
from samo.mask.mask import Mask
from samo.train import events
from tests.report.runs import NUMEL, accounted, gradual, observed, pruned, stepped


def shown(*happened: events.Event) -> str:
    """Return the lines that a log gets of a run of 100 steps."""
    printed = io.StringIO()
    display = Display(Console(file=printed, width=200))
    for event in (events.Started(step=0, steps=100, time=0.0), *happened):
        display.on(event)
    return printed.getvalue()


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (pruned(50), "step  50/100  pruned 90 %: 78,643 of 786,432 weights kept\n"),
        (pruned(50, reason="settled"), "  masks have settled: pruned 90 %: 78,643 of 786,432"),
        (pruned(50, reason="limit"), "  limit reached, masks not settled: pruned 90 %"),
        (pruned(50, NUMEL), "compressed; 786,432 weights will be pruned step by step"),
    ],
)
def test_the_line_about_pruning_says_why(event: events.Pruned, words: str) -> None:
    assert words in shown(event)


def test_the_data_of_a_run_is_told() -> None:
    data = events.Opened(step=0, tokens=7000, sequences=1, valid_tokens=300)
    assert "data: 7,000 tokens in 1 sequence; 300 tokens held out\n" in shown(data)


def numbers_of(*happened: events.Event) -> str:
    """Return what a step's line says at the end of a run, where all lines are shown."""
    return shown(*happened, stepped(100, phase="samo")).splitlines()[-1]


def test_lines_of_steps_show_the_masks_and_the_state() -> None:
    looks = observed(2)
    assert "loss 2.000  masks differ by 0.220  16,850 tokens/s" in numbers_of(*looks)
    assert "masks" not in numbers_of(*looks, pruned(50))
    assert "loss 2.000  90 % pruned  16,850 tokens/s" in numbers_of(*gradual())
    alone, shared = accounted(1), accounted(1, rank_bytes=(3_000_000, 2_816_112))
    assert "s  state 5.82 MB  left 0.0 s" in numbers_of(alone)
    assert "s  rank 0: state 3.00 MB  left" in numbers_of(shared)
    assert "state" not in numbers_of(alone, pruned(50))


def test_a_terminal_shows_a_live_bar_and_names_the_compilation() -> None:
    out = io.StringIO()
    with Display(Console(file=out, width=120, force_terminal=True)) as display:
        display.on(events.Started(step=0, steps=9, time=0.0))
        display.on(events.Compiling(step=0))
        display.on(events.Ticked(step=9))
        display.on(stepped(9))
    drawn = out.getvalue()
    assert "\x1b[" in drawn  # it moves the cursor
    for part in ("compiling: ", "9/9", "loss 2.000", "tokens/s"):
        assert part in drawn


def test_layers_are_in_their_order_and_equal_ones_share_a_row() -> None:
    masks = [Mask.from_bool(torch.tensor([[True, is_kept]])) for is_kept in (False, True)]
    named = [(f"layers.{i}.up.weight", masks[i == 3]) for i in (1, 10, 2, 3)]
    named.append(("head.weight", masks[0]))
    rows = group_table("layer", named, layer_of).columns[0].cells
    assert [str(cell) for cell in rows] == ["head", "layers.1-2, each", "layers.3", "layers.10"]
    rows = group_table("weight", named, kind_of).columns[0].cells
    assert [str(cell) for cell in rows] == ["head", "layers.*.up"]
