"""What does pruning cost a GPT in validation loss? Each contender is one function of this file.

    python -m benchmarks.quality.gpt --out DIR

All contenders read the same bytes in the same order and take equally many steps, each at its own
learning rate: the first seed tries one rate after the other, from the lowest on, until the loss
gets worse. Rows are kept after each run; what is there already is not run again.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch

import samo
from benchmarks.quality import gpt_page, rates, runs
from benchmarks.quality.gpt_run import QUICK, Run, Settings, matching_shape
from benchmarks.quality.text import LEAST_BYTES, find_text, order
from samo.errors import SamoError

# The contenders


def dense(run: Run) -> None:
    """Train all weights."""
    for _ in run.steps():
        pass


def early_bird(run: Run, sparsity: float, *, is_limited: bool = True) -> None:
    """Train densely until masks have settled, or for a quarter of the run; then draw the ticket."""
    bird = samo.EarlyBird(run.model, sparsity)
    every, limit = run.settings.every(40), run.settings.dense_limit if is_limited else 0.9
    for calls, step in enumerate(run.steps()):
        is_drawn = calls % every == 0 and bird.observe()
        if is_drawn or step >= limit * run.settings.steps:
            break
    run.compress(bird.draw_now())
    run.ticket = bird.reason
    dense(run)


def at_start(run: Run, method: Literal["magnitude", "random"]) -> None:
    """Prune 90 % before the first step."""
    run.compress(samo.prune(run.model, 0.9, method=method, seed=run.seed))
    dense(run)


def dynamic(run: Run, grow: Literal["gradient", "random"]) -> None:
    """Start from random masks of 90 %, and move a part of them every so often, for 3/4 of the run."""
    masks = samo.prune(run.model, 0.9, method="random", seed=run.seed)
    run.compress(masks, entry_steps=True)
    moving = samo.DynamicSparse(
        run.model,
        run.opt,
        grow=grow,
        drop=0.3,
        every=run.settings.every(12),
        stop=max(3 * run.settings.steps // 4, 1),
        seed=run.seed,
    )
    for _ in run.steps():
        moving.step()


def gradual(run: Run) -> None:
    """Prune step by step to 90 %, from a tenth of the run to six tenths."""
    run.compress(samo.Masks.ones(run.model))
    steps = run.settings.steps
    pruning = samo.GradualPruning(
        run.model,
        run.opt,
        sparsity=0.9,
        start=steps // 10,
        stop=6 * steps // 10,
        every=run.settings.every(40),
    )
    for _ in run.steps():
        run.masks = pruning.step() or run.masks


class Contender(NamedTuple):
    """What it is called, and what it does."""

    title: str
    train: Callable[[Run], None]
    is_small: bool = False
    """Whether it is the dense GPT with the state of the pruned one."""
    is_usual: bool = True
    """Whether it is run without being asked for."""


CONTENDERS: Final = {
    "dense": Contender("dense", dense),
    "early-bird-80": Contender("Early-Bird 80 %", partial(early_bird, sparsity=0.8)),
    "early-bird-90": Contender("Early-Bird 90 %", partial(early_bird, sparsity=0.9)),
    "gradual-90": Contender("gradual 90 %", gradual),
    "rigl-90": Contender("RigL 90 %", partial(dynamic, grow="gradient")),
    "magnitude-90": Contender("magnitude at init 90 %", partial(at_start, method="magnitude")),
    "random-90": Contender("random 90 %", partial(at_start, method="random")),
    "small-dense": Contender("small dense, same bytes", dense, is_small=True),
    "set-90": Contender("SET 90 %", partial(dynamic, grow="random"), is_usual=False),
    "settled-90": Contender(
        "Early-Bird 90 %, once settled",
        partial(early_bird, sparsity=0.9, is_limited=False),
        is_usual=False,
    ),
}


def train(job: runs.Job, settings: Settings, paths: list[Path], device: str) -> runs.Row:
    """Train one contender with one seed, and return its row."""
    name, seed, lr = job
    contender = CONTENDERS[name]
    place = torch.device(device)
    shape = matching_shape(settings.shape) if contender.is_small else settings.shape
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    run = Run(settings, shape, find_text(paths, least=0), place, seed=seed, lr=lr)
    contender.train(run)
    held = [size for _, size, _ in run.states]
    trained_s = run.trained_s
    tokens = settings.steps * settings.batch * settings.context
    return {
        "contender": name,
        "title": contender.title,
        "seed": seed,
        "lr": lr,
        "valid_loss": run.curve[-1][1],
        "curve": run.curve,
        "num_params": sum(p.numel() for p in run.model.parameters()),
        "width": shape.width,
        "pruned_params": 0
        if run.masks is None
        else sum(m.numel - m.kept for m in run.masks.values()),
        "ticket": run.ticket,
        "states": run.states,
        "peak_state_bytes": max(held),
        "final_state_bytes": held[-1],
        # Steps taken with more state than in the end: the dense phase, or that of pruning.
        "large_steps": run.states[-1][0] - 1 if max(held) > held[-1] else 0,
        "large_s": run.states[-1][2] if max(held) > held[-1] else 0.0,
        "train_s": trained_s,
        "tokens": tokens,
        "tokens_per_s": tokens / trained_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(place)
        if place.type == "cuda"
        else None,
        "skipped_steps": run.opt.skipped_steps if isinstance(run.opt, samo.AdamW) else 0,
    }


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for rows, page and figures")
    add("--only", nargs="+", choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--lrs", type=float, nargs="+", default=list(rates.USUAL), help="learning rates to try")
    add("--text", type=Path, nargs="+", default=[], help="files and folders")
    add("--parallel", type=int, default=1, help="runs at a time, each in a process of its own")
    add("--minutes", type=float, help="start no run that would end later, as far as is known")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="tiny sizes, only to see that it runs")
    add("--page-only", action="store_true", help="no runs: page and figures of the rows there are")
    for field in fields(Settings):
        if field.type in (int, float) and not field.name.endswith("_bytes"):
            flag = f"--{field.name.replace('_', '-')}"
            add(flag, type=field.type, help=f"by default {field.default}")
    options = parser.parse_args()
    try:
        _go(options)
    except SamoError as error:
        sys.exit(f"error: {error}")


def _go(options: argparse.Namespace) -> None:
    if options.page_only:
        with runs.kept_rows(options.out, None) as kept:
            gpt_page.write(options.out, kept.rows, list(CONTENDERS))
        return
    text = find_text(options.text, least=0 if options.quick else LEAST_BYTES)
    given: dict[str, Any] = QUICK if options.quick else {}
    typed = {f.name: getattr(options, f.name, None) for f in fields(Settings) if f.name != "text"}
    settings = Settings(
        **(given | {key: value for key, value in typed.items() if value is not None}),
        text=text.digest,
        train_bytes=len(text.train),
        valid_bytes=len(text.valid),
        text_source=text.source,
    )
    # Refused here rather than in every run: a byte must not be seen more than four times.
    sizes = {"steps": settings.steps, "batch": settings.batch, "context": settings.context}
    order(len(text.train), **sizes, seed=0)
    seen = math.prod(sizes.values()) / len(text.train)
    print(
        f"text: {settings.train_bytes:,} bytes of {text.source}, each seen {seen:.2f} times on average"
    )
    usual = [name for name, contender in CONTENDERS.items() if contender.is_usual]
    names = options.only or usual
    plan = partial(rates.plan, names=names, seeds=options.seeds, lrs=options.lrs)
    with runs.kept_rows(options.out, settings) as kept:
        work = partial(train, settings=settings, paths=options.text, device=options.device)
        device = torch.device(options.device)
        try:
            runs.finish(
                kept, plan, work, device=device, parallel=options.parallel, minutes=options.minutes
            )
        finally:
            if kept.rows:
                gpt_page.write(options.out, kept.rows, list(CONTENDERS))
                print(f"page: {options.out / 'README.md'}")


if __name__ == "__main__":
    main()
