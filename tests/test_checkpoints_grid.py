"""Checkpoints of many ranks: what one process would have written, from and into any layout."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import samo
from tests.checkpoint_cases import Case, Layout, Run, contents
from tests.launch import run_ranks

EXACT = (
    Case(),
    Case(torch.bfloat16),
    Case(torch.bfloat16, "sgd"),
    Case(torch.bfloat16, is_tied=True),
)
LEAN = Case(torch.bfloat16, "lean")
FOUR = (
    Layout(2, 2),
    Layout(2, 2, "state"),
    Layout(4, 1),
    Layout(1, 4),
    Layout(1, 4, "state"),
    Layout(2, 2, "state", "interleaved"),
)
THREE = (Layout(1, 3, "state"), Layout(3, 1))


def quick_disk() -> None:
    os.fsync = lambda file: None  # type: ignore[assignment]


def reference(case: Case, path: Path, seed: int = 7) -> None:
    """Write what one process would."""
    run = Run(case, None)
    run.train(1)
    run.randomise(seed)
    samo.save(path, run.pipeline, run.opt, extra={"step": 3, "seeds": torch.arange(3)})
    run.close()


def differing(path: Path, expected: Path) -> list[str]:
    """Return what is not the same in two checkpoints."""
    a, b = contents(path), contents(expected)
    return [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


def save_and_load(
    rank: int, num_ranks: int, folder: Path, cases: tuple[Case, ...], layouts: tuple[Layout, ...]
) -> list[str]:
    """Save each case in each layout, and load what one process saved; return what differs."""
    quick_disk()
    wrong = []
    for case in cases:
        for layout in layouts:
            given = {"step": 3, "seeds": torch.arange(3)} if rank == 0 else {"other": rank}
            run = Run(case, layout)
            run.train(1)
            run.randomise()
            path = folder / f"{case.name}-{layout.name}"
            samo.save(path, run.pipeline, run.opt, extra=given)
            if differing(path, folder / case.name):
                wrong.append(f"{path.name} saved: {differing(path, folder / case.name)}")
            run.close()
            again = Run(case, layout, samo.Masks.load(path), seed=1)
            found = samo.load(folder / case.name, again.pipeline, again.opt)
            assert found["step"] == 3
            samo.save(f"{path}-again", again.pipeline, again.opt, extra=given)
            if differing(Path(f"{path}-again"), folder / case.name):
                bad = differing(Path(f"{path}-again"), folder / case.name)
                wrong.append(f"{path.name} loaded: {bad}")
            again.close()
    return wrong


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_every_layout_writes_and_reads_what_one_process_would(
    num_ranks: int, tmp_path: Path
) -> None:
    cases = EXACT if num_ranks == 4 else EXACT[2:]
    for case in cases:
        reference(case, tmp_path / case.name)
    layouts = FOUR if num_ranks == 4 else THREE
    results = run_ranks(num_ranks, save_and_load, tmp_path, cases, layouts, timeout_s=100)
    assert results == [[]] * num_ranks
