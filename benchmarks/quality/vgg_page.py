"""The page of the VGGs: the table, what it says in words, and the figures. All of it is made from rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.quality import spreads
from benchmarks.quality.figures import Curve, Figure, curves_figure, dots_figure
from benchmarks.quality.pages import figure_data, write_page
from samo.bench.rows import Table
from samo.utils.formatting import NOTHING, count, duration, percent, size

__all__ = ["write"]

Row = dict[str, Any]

_HEAD: Final = (
    "contender",
    "channels pruned",
    "weights pruned",
    "fewest channels of a layer",
    "drawn after epochs",
    "state in the end",
    "time of the run",
    "accuracy, %",
    "against unpruned",
)


def write(folder: Path, rows: Sequence[Row], order: Sequence[str]) -> None:
    """Write the page of some rows; ``order`` has the names of the contenders, from the top."""
    settings = rows[0]["settings"]
    found = spreads.by_contender([row for row in rows if row["failure"] is None], order)
    base = found.get("unpruned", [])
    seeds = sorted({row["seed"] for row in rows})
    figures: dict[str, tuple[str, Figure]] = {}
    if found:
        figures = {
            "accuracy": ("Accuracy of every run", _dots(found)),
            "curves": ("Accuracy over epochs", _curves(found)),
        }
    write_page(
        folder,
        title="What tickets of channels cost a VGG",
        command="python -m benchmarks.quality.vgg --data FOLDER --out DIR "
        + " ".join(f"--{name} {value}" for name, value in settings.items()),
        rows=rows,
        notes=[
            f"VGG-11 with BatchNorm, {count(rows[0]['num_params'])} parameters, on Fashion-MNIST "
            f"({count(settings['images'])} images at most, 32 x 32 with a border, shifted and mirrored by "
            "chance); fp32.",
            f"{settings['epochs']} epochs of SGD (rate {settings['lr']}, divided by 10 after a half and "
            f"three quarters; momentum 0.9, decay 1e-4, {settings['batch']} images a step). Seeds "
            f"{', '.join(map(str, seeds))}.",
            "Tickets: scales of BatchNorm, one threshold for the whole network, a look before each epoch, "
            "five masks within a Hamming distance of 0.1; then training continues with what is kept, from the weights of "
            "that moment. 1e-4 sign(gamma) is added to the gradients of scales, before and after.",
            "Accuracy on the test images after the last epoch: mean +- standard deviation over seeds. "
            "Against unpruned: the same of the differences seed by seed; negative is worse. "
            '"Worse" and "better" below: the 95 % interval of the mean difference leaves out 0.',
        ],
        table=Table(_HEAD, [_line(several, base) for several in found.values()]),
        findings=[*_findings(found, base), *_tickets(rows)],
        figures=figures,
    )


def _line(rows: Sequence[Row], base: Sequence[Row]) -> tuple[str, ...]:
    def mean(part: str, whole: str) -> str:
        share = spreads.of([row[part] / row[whole] for row in rows]).mean
        return percent(share) if share else NOTHING

    difference = spreads.against(rows, base, "accuracy")
    epochs = [row["drawn_epoch"] for row in rows]
    fewest = [row["fewest_channels"] for row in rows if row["fewest_channels"] is not None]
    return (
        rows[0]["title"],
        mean("pruned_channels", "num_channels"),
        mean("pruned_params", "num_params"),
        count(min(fewest)) if fewest else NOTHING,
        ", ".join(NOTHING if epoch is None else str(epoch) for epoch in epochs),
        size(spreads.of([row["state_bytes"] for row in rows]).mean),
        duration(spreads.of([row["train_s"] for row in rows]).mean),
        spreads.of([row["accuracy"] for row in rows]).text(".2f"),
        NOTHING if difference is None or rows is base else difference.text("+.2f"),
    )


def _findings(found: dict[str, list[Row]], base: Sequence[Row]) -> list[str]:
    """Say in words where pruning loses and where it wins, as far as the seeds tell."""
    sentences = []
    for rows in found.values():
        difference = spreads.against(rows, base, "accuracy")
        if rows is base or difference is None:
            continue
        how = "one seed, not to be compared with"
        if difference.number > 1:
            how = "not clearly other than"
        if difference.is_clear:
            how = "worse than" if difference.mean < 0 else "better than"
        sentences.append(f"{rows[0]['title']}: {how} unpruned ({difference.text('+.2f')}).")
    return sentences


def _tickets(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row['title']}, seed {row['seed']}: "
        + (f"not counted, {row['failure']}." if row["failure"] else f"ticket {row['ticket']}.")
        for row in rows
        if row["ticket"] or row["failure"]
    ]


def _dots(found: dict[str, list[Row]]) -> Figure:
    contenders = [(rows[0]["title"], [row["accuracy"] for row in rows]) for rows in found.values()]
    return dots_figure(contenders, title="Accuracy in the end, %", form=".2f")


def _curves(found: dict[str, list[Row]]) -> Figure:
    curves = []
    for rows in found.values():
        x, values = figure_data(rows, "curve")
        means = [spreads.of(several).mean for several in values]
        curves.append(Curve(rows[0]["title"], x, means, [*map(min, values)], [*map(max, values)]))
    # The first epochs would flatten the differences of the last ones.
    quarter = len(curves[0].mean) // 4
    low = min(min(curve.low[quarter:]) for curve in curves)
    high = max(max(curve.high) for curve in curves)
    return curves_figure(
        curves,
        title="Accuracy, %",
        axis="epochs",
        low=low - 0.02 * (high - low) - 1e-3,
        high=high + 0.05 * (high - low) + 1e-3,
    )
