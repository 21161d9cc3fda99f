"""The figures: every legend says which lines are measured, digitised, printed or modelled."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from PIL import Image

from benchmarks.drawing import LIGHT, drawing, new_figure, place, to_png
from benchmarks.paper.published import read
from benchmarks.paper.summit import MODELS, NODE, PARTS, calibrate

__all__ = ["FIGURES"]

_RESULTS: Final = Path(__file__).parents[1] / "results"
_WIDTH: Final = 980
_OURS: Final = {"resident": "run1", "streamed": "run4", "streamed, lean": "run3"}


def panels(
    figure: Canvas, columns: int, *, top: float, bottom: float, left: float = 56, gap: float = 44
) -> Iterator[Axes]:
    """Yield axes side by side."""
    wide = (_WIDTH - left - 16 - gap * (columns - 1)) / columns
    for column in range(columns):
        start = left + column * (wide + gap)
        axes = place(figure, left=start, right=_WIDTH - start - wide, top=top, bottom=bottom)
        axes.grid(axis="y")
        yield axes


def headline(figure: Canvas, title: str, note: str) -> None:
    """Write title and source above the panels."""
    height = figure.get_figheight() * figure.dpi
    figure.text(14 / _WIDTH, 1 - 24 / height, title, fontsize=14, weight="bold")
    figure.text(14 / _WIDTH, 1 - 44 / height, note, fontsize=10, color=LIGHT["muted"])


def line(axes: Axes, x: Any, y: Any, style: str, colour: str, label: str) -> None:
    """Plot one line or its points."""
    axes.plot(x, y, style, color=LIGHT[colour], label=label, markersize=6.5)


def legend(figure: Canvas, axes: Axes, columns: int, order: list[int] | None = None) -> None:
    """Put the legend of one panel below all of them."""
    handles, labels = axes.get_legend_handles_labels()
    places = order or range(len(handles))
    figure.legend(
        [handles[i] for i in places],
        [labels[i] for i in places],
        loc="lower center",
        ncols=columns,
        frameon=False,
        fontsize=10.5,
    )


def gpu_axis(axes: Axes, gpus: list[int]) -> None:
    """Give an axis the numbers of GPUs that were used."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [f"{number:,}" for number in gpus], fontsize=10)
    axes.minorticks_off()
    axes.set_xlabel("GPUs", fontsize=10)


def scaling() -> Canvas:
    """Draw seconds, and time over AxoNN's, of the four GPTs on Summit."""
    figure, fit = new_figure(_WIDTH, 640), calibrate()
    headline(
        figure,
        "Strong scaling on Summit, GPT-3 at 90 % sparsity",
        "Points: Fig. 6 and 7 of the paper, digitised. Lines: model, calibrated on the grey points only.",
    )
    above = panels(figure, 4, top=108, bottom=356)
    below = panels(figure, 4, top=338, bottom=104)
    for model, upper, lower in zip(MODELS, above, below, strict=True):
        dense = [row for row in read("dense") if row["model"] == model]
        pruned = [row for row in read("pruned") if row["model"] == model]
        gpus = [int(row["gpus"]) for row in dense]
        base = np.array([row["axonn"] for row in dense])
        samo = np.array([row["samo"] for row in pruned])
        for axes, over in ((upper, np.ones(4)), (lower, base)):
            lines = {"dense": ("whole", "-"), "paper": ("run0", "-")}
            if axes is lower:
                lines |= {name: (colour, "--") for name, colour in _OURS.items()}
            for scheme, (colour, style) in lines.items():
                seconds = np.array([fit.seconds(model, scheme, number) for number in gpus])
                names = {"dense": "AxoNN, model", "paper": "AxoNN+SAMO, predicted"}
                label = names.get(scheme, f"samo, {scheme}, model")
                line(axes, gpus, seconds / over, style, colour, label)
            line(axes, gpus, base / over, "o", "muted", "AxoNN, digitised")
            line(axes, gpus, samo / over, "o", "run0", "AxoNN+SAMO, digitised")
            gpu_axis(axes, gpus)
        upper.set_title(model, loc="left", fontsize=12, weight="bold")
        upper.set_xlabel("")
        upper.set_yscale("log")
        low, high = samo.min() * 0.8, base.max() * 1.25
        upper.set_ylim(low, high)
        ticks = [t for t in (0.5, 1, 2, 5, 10, 20) if low <= t <= high]
        upper.set_yticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=10)
        upper.minorticks_off()
        lower.set_ylim(0.4, 1.12)
        lower.tick_params(axis="y", labelsize=10)
    for below_top, text in ((76, "seconds a step"), (322, "time over AxoNN's, as digitised")):
        place_ = (14 / _WIDTH, 1 - below_top / 640)
        figure.text(*place_, text, fontsize=11, color=LIGHT["muted"])
    legend(figure, lower, 4, [5, 0, 6, 1, 2, 3, 4])
    return figure


def measured_state() -> list[tuple[str, float]]:
    """Return bytes for each pruned parameter that our ledger counted at 90 % on an H200."""
    found: dict[str, float] = {}
    for folder in ("step-gpt3-2.7b-h200-2026-11-16", "streamed-h200-2026-11-16"):
        for line in (_RESULTS / folder / "rows.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["parameters"]["shape"] == "gpt3-2.7b" and "budget" not in row["name"]:
                figures = row["figures"]
                state = figures.get("pruned_bytes_per_param") or figures["state_bytes_per_param"]
                found.setdefault(row["name"], state)
    return list(found.items())


def memory() -> Canvas:
    """Draw bytes for each parameter against sparsity."""
    figure = new_figure(_WIDTH, 480)
    headline(
        figure,
        "State, bytes for each pruned parameter",
        "Lines: formulas (Adam, 16-bit compute, no activations). Points: measured on an H200 at 90 %, GPT-3 2.7B, 2026-11-16. Crosses: printed in the paper.",
    )
    axes = place(figure, left=56, right=340, top=66, bottom=52)
    sparsity = np.linspace(0, 0.99, 100)
    f = 1 - sparsity
    lines: dict[str, tuple[Any, str, str]] = {
        "dense, fp32 master and gradient: 20": (20 + 0 * f, "muted", "-"),
        "SAMO paper: 2 + 24f": (2 + 24 * f, "run0", "-"),
        "samo, resident: 2.13 + 14f": (2.13 + 14 * f, "run1", "-"),
        "samo, resident, lean: 2.14 + 7f": (2.14 + 7 * f, "run1", "--"),
        "samo, streamed: 0.13 + 14f": (0.13 + 14 * f, "run4", "-"),
        "samo, streamed, lean: 0.14 + 7f": (0.14 + 7 * f, "run3", "--"),
    }
    for label, (values, colour, dashes) in lines.items():
        line(axes, 100 * sparsity, values, dashes, colour, f"{label} (formula)")
    names = {
        "masked": ("muted", "dense, masked"),
        "flashoptim": ("run2", "FlashOptim, all parameters"),
        "samo": ("run1", "samo, resident"),
        "lean": ("run1", "samo, resident, lean"),
        "streamed": ("run4", "samo, streamed"),
        "streamed-lean": ("run3", "samo, streamed, lean"),
    }
    for name, value in measured_state():
        if name in names:
            colour, label = names[name]
            marker = "s" if "lean" in name else "o"
            line(axes, 90, value, marker, colour, f"{label}: {value:.2f} (measured)")
    for at, gigabytes, name in ((0, 80.16, "AxoNN"), (90, 20.28, "AxoNN+SAMO")):
        value = gigabytes / 2.7
        label = f"{name} 2.7B, all memory: {value:.1f} (printed)"
        line(axes, at, value, "x", "run0", label)
    axes.set_yscale("log")
    axes.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_xticks([0, 25, 50, 80, 90, 99], ["0 %", "25", "50", "80", "90", "99"])
    axes.set_xlabel("sparsity")
    axes.grid(axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.02), frameon=False, fontsize=10)
    return figure


def breakdown() -> Canvas:
    """Draw the parts of a step of 2.7B: bars of Fig. 8 beside the model's."""
    figure, fit = new_figure(_WIDTH, 430), calibrate()
    headline(
        figure,
        "Where a step of GPT-3 2.7B goes, seconds",
        "Left bar of a pair: Fig. 8, digitised. Right bar: model. Fig. 8's split of compute and messages cannot be true: see the text.",
    )
    rows = read("breakdown")
    published = ("compute", "bubble", "messages", "collective", "other")
    names = (*published[:4], "other (Fig. 8) or compress and update (model)")
    colours = ("run5", "whole", "run4", "run1", "run3")
    for axes, gpus in zip(panels(figure, 3, top=84, bottom=90), (128, 256, 512), strict=True):
        axes.set_title(f"{gpus} GPUs", loc="left", fontsize=12, weight="bold")
        pair = [row for row in rows if row["gpus"] == gpus]
        for place_, row in zip((0.0, 1.0), pair, strict=True):
            scheme = {"axonn": "dense", "samo": "paper"}[row["system"]]
            ours = fit.parts("2.7B", scheme, gpus)
            for shift, values in (
                (-0.2, [row[key] for key in published]),
                (0.2, [ours[key] for key in PARTS]),
            ):
                bottom = 0.0
                for value, colour, name in zip(values, colours, names, strict=True):
                    axes.bar(
                        place_ + shift,
                        value,
                        0.36,
                        bottom,
                        color=LIGHT[colour],
                        hatch="" if shift < 0 else "///",
                        edgecolor="white",
                        linewidth=0,
                        label=name if (shift, place_) == (-0.2, 0.0) else "",
                    )
                    bottom += value
                axes.text(
                    place_ + shift, bottom, f"{bottom:.2f}", ha="center", va="bottom", fontsize=10
                )
        axes.set_xticks([0, 1], ["AxoNN", "AxoNN+SAMO"], fontsize=11)
        axes.tick_params(axis="y", labelsize=10)
    legend(figure, axes, 5)
    return figure


def cnn() -> Canvas:
    """Draw the CNN rows, and what a smaller all-reduce alone would save."""
    figure, fit = new_figure(_WIDTH, 400), calibrate()
    headline(
        figure,
        "CNNs on Summit, pure data parallelism, ms a step",
        "Points: Fig. 5, digitised. Dashed: AxoNN's points less nine tenths of an all-reduce (model, one flow a node). Printed: the saving.",
    )
    rate = NODE / fit.costs[3] * 1e9  # of a node
    models = ("WideResnet-101", "VGG-19")
    for axes, model in zip(panels(figure, 2, top=84, bottom=92, gap=60), models, strict=True):
        rows = [row for row in read("cnn") if row["model"] == model]
        gpus = [int(row["gpus"]) for row in rows]
        axes.set_title(model, loc="left", fontsize=12, weight="bold")
        for key, colour, name in (("axonn", "muted", "AxoNN"), ("samo", "run0", "AxoNN+SAMO")):
            line(axes, gpus, [row[key] for row in rows], "o-", colour, f"{name}, digitised")
        saved = [1e3 * 0.9 * 4 * row["parameters"] / rate for row in rows]
        predicted = [row["axonn"] - less for row, less in zip(rows, saved)]
        line(axes, gpus, predicted, "--", "run1", "AxoNN+SAMO, model")
        for row in rows:
            axes.annotate(
                f"-{row['reduction']:.0f} %",
                (row["gpus"], row["axonn"]),
                (4, 8),
                textcoords="offset points",
                fontsize=10,
                color=LIGHT["run0"],
            )
        gpu_axis(axes, gpus)
        axes.set_ylim(0, 1.15 * rows[0]["axonn"])
    legend(figure, axes, 3)
    return figure


def kernels() -> Canvas:
    """Draw the time of sparse products over that of dense ones."""
    figure = new_figure(_WIDTH, 420)
    headline(
        figure,
        "Sparse products over dense ones, 90 % sparse square weight, 576 tokens",
        "V100: Fig. 1 of the paper, digitised. H200: our measurement, bf16, torch 2.11, 2026-11-15. Under 1 the sparse product is faster.",
    )
    axes = place(figure, left=56, right=300, top=66, bottom=52)
    rows = read("kernels")
    sizes = [row["size"] for row in rows]
    for key, colour, name in (("cusparse", "run1", "cuSPARSE"), ("sputnik", "run4", "Sputnik")):
        ratios = [row[key] / row["cublas"] for row in rows]
        line(axes, sizes, ratios, "o--", colour, f"{name}, V100, fp16 (digitised)")
    path = _RESULTS / "sparse-vs-dense-h200-2026-11-15" / "rows.jsonl"
    ours = [json.loads(line) for line in path.read_text().splitlines()]
    for name, colour, label in (
        ("csr", "run0", "cuSPARSE CSR"),
        ("bsr 64", "run2", "blocks of 64 x 64"),
    ):
        found = [row for row in ours if row["name"] == name and row["parameters"]["tokens"] == 576]
        found_sizes = [row["parameters"]["size"] for row in found]
        ratios = [row["figures"]["against_dense"] for row in found]
        line(axes, found_sizes, ratios, "s-", colour, f"{label}, H200, bf16 (measured)")
    axes.axhline(1, color=LIGHT["muted"], linewidth=0.9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_yticks(
        [0.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"]
    )
    axes.set_xticks([2**k for k in range(7, 14)], [f"{2**k:,}" for k in range(7, 14)])
    axes.minorticks_off()
    axes.set_xlabel("size of the weight")
    axes.grid(axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.02), frameon=False, fontsize=10.5)
    return figure


FIGURES: dict[str, Callable[[], Canvas]] = {
    "scaling": scaling,
    "memory": memory,
    "breakdown": breakdown,
    "cnn": cnn,
    "kernels": kernels,
}


def save(folder: Path) -> None:
    """Draw all figures; 256 colours make files of a third of the size."""
    for name, draw in FIGURES.items():
        with drawing():
            picture = Image.open(io.BytesIO(to_png(draw()))).convert("RGB")
        picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(
            folder / f"{name}.png", optimize=True
        )
