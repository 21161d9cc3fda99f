"""The figures: every legend says which lines are measured, digitised, printed or modelled."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from PIL import Image

from benchmarks.drawing import LIGHT, drawing, new_figure, place, to_png
from benchmarks.paper.clusters import CONTEXT, answers
from benchmarks.paper.published import read
from benchmarks.paper.summit import MODELS, NODE, PARTS, calibrate

_RESULTS: Final = Path(__file__).parents[1] / "results"
_WIDTH: Final = 980
_SCHEMES: Final = {
    "dense": ("AxoNN, model", "whole", "-"),
    "paper": ("AxoNN+SAMO, predicted", "run0", "-"),
    "resident": ("samo, resident, model", "run1", "--"),
    "streamed": ("samo, streamed, model", "run4", "--"),
    "streamed, lean": ("samo, streamed, lean, model", "run3", "--"),
}
_STATE: Final = (  # label, formula, contender of our benchmark, colour, line, point
    ("dense, fp32 master and gradient: 20", (20, 0), "masked", "muted", "-", "o"),
    ("SAMO paper: 2 + 24f", (2, 24), None, "run0", "-", ""),
    ("samo, resident: 2.13 + 14f", (2.13, 14), "samo", "run1", "-", "o"),
    ("samo, resident, lean: 2.14 + 7f", (2.14, 7), "lean", "run1", "--", "s"),
    ("samo, streamed: 0.13 + 14f", (0.13, 14), "streamed", "run4", "-", "o"),
    ("samo, streamed, lean: 0.14 + 7f", (0.14, 7), "streamed-lean", "run3", "--", "s"),
)


def panels(
    figure: Canvas, columns: int, *, top: float, bottom: float, right: float = 16, gap: float = 44
) -> list[Axes]:
    """Return axes side by side."""
    wide = (_WIDTH - 56 - right - gap * (columns - 1)) / columns
    starts = [56 + column * (wide + gap) for column in range(columns)]
    found = [place(figure, left=s, right=_WIDTH - s - wide, top=top, bottom=bottom) for s in starts]
    for axes in found:
        axes.grid(axis="y")
        axes.tick_params(labelsize=10)
    return found


def new(height: int, title: str, note: str) -> Canvas:
    """Return a figure with its title, and what is measured and what is modelled in it."""
    figure = new_figure(_WIDTH, height)
    figure.text(14 / _WIDTH, 1 - 24 / height, title, fontsize=14, weight="bold")
    figure.text(14 / _WIDTH, 1 - 44 / height, note, fontsize=10, color=LIGHT["muted"])
    return figure


def single(height: int, title: str, note: str, *, right: float) -> tuple[Canvas, Axes]:
    """Return a figure of one panel, with room for its legend to the right."""
    figure = new(height, title, note)
    (axes,) = panels(figure, 1, top=66, bottom=52, right=right)
    return figure, axes


def line(axes: Axes, x: Any, y: Any, style: str, colour: str, label: str) -> None:
    """Plot one line or its points."""
    axes.plot(x, y, style, color=LIGHT[colour], label=label, markersize=6.5)


def logarithmic(axes: Axes, which: str, ticks: Sequence[float], label: str = "") -> None:
    """Make an axis logarithmic with these ticks."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    axis.set_ticks(ticks, [f"{tick:,g}" for tick in ticks])
    axis.set_label_text(label, fontsize=10)
    axis.minorticks_off()


def legend(figure: Canvas, axes: Axes, columns: int, order: Sequence[int] = ()) -> None:
    """Put the legend of one panel below all of them."""
    found = list(zip(*axes.get_legend_handles_labels()))
    handles, labels = zip(*(found[i] for i in order or range(len(found))))
    look: dict[str, Any] = {"loc": "lower center", "frameon": False, "fontsize": 10.5}
    figure.legend(handles, labels, ncols=columns, **look)


def side_legend(axes: Axes) -> None:
    """Put the legend to the right of the only panel."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.02), frameon=False, fontsize=10)


def results(folder: str) -> list[dict[str, Any]]:
    """Return the rows of one of our benchmarks."""
    return [json.loads(row) for row in (_RESULTS / folder / "rows.jsonl").read_text().splitlines()]


def scaling() -> Canvas:
    """Draw seconds, and time over AxoNN's, of the four GPTs on Summit."""
    title = "Strong scaling on Summit, GPT-3 at 90 % sparsity"
    note = "Points: Fig. 6 and 7 of the paper, digitised. Lines: model, chosen by and calibrated on the grey points only."
    figure, fit = new(640, title, note), calibrate()
    above, below = panels(figure, 4, top=108, bottom=356), panels(figure, 4, top=338, bottom=104)
    for model, upper, lower in zip(MODELS, above, below, strict=True):
        dense = [row for row in read("dense") if row["model"] == model]
        gpus = [int(row["gpus"]) for row in dense]
        base = np.array([row["axonn"] for row in dense])
        samo = np.array([row["samo"] for row in read("pruned") if row["model"] == model])
        for axes, over in ((upper, np.ones(4)), (lower, base)):
            for scheme, (label, colour, style) in _SCHEMES.items():
                if axes is lower or scheme in ("dense", "paper"):
                    seconds = np.array([fit.seconds(model, scheme, number) for number in gpus])
                    line(axes, gpus, seconds / over, style, colour, label)
            line(axes, gpus, base / over, "o", "muted", "AxoNN, digitised")
            line(axes, gpus, samo / over, "o", "run0", "AxoNN+SAMO, digitised")
            logarithmic(axes, "x", gpus, "GPUs" if axes is lower else "")
        upper.set_title(model, loc="left", fontsize=12, weight="bold")
        fastest = fit.seconds(model, "paper", gpus[-1])
        low, high = min(samo.min(), fastest) * 0.8, base.max() * 1.25
        logarithmic(upper, "y", [t for t in (0.5, 1, 2, 5, 10, 20) if low <= t <= high])
        upper.set_ylim(low, high)
        lower.set_ylim(0.3, 1.12)
    for down, text in ((76, "seconds a step"), (322, "time over AxoNN's, as digitised")):
        figure.text(14 / _WIDTH, 1 - down / 640, text, fontsize=11, color=LIGHT["muted"])
    legend(figure, lower, 4, (5, 0, 6, 1, 2, 3, 4))
    return figure


def memory() -> Canvas:
    """Draw bytes for each parameter against sparsity."""
    title = "State, bytes for each pruned parameter"
    note = "Lines: formulas (Adam, 16-bit compute, no activations). Points: measured on an H200 at 90 %, GPT-3 2.7B, 2026-11-16. Crosses: printed in the paper."
    figure, axes = single(480, title, note, right=340)
    measured = {}
    for row in results("step-gpt3-2.7b-h200-2026-11-16") + results("streamed-h200-2026-11-18"):
        if row["parameters"]["shape"] == "gpt3-2.7b":
            figures = row["figures"]
            whole = figures["state_bytes_per_param"]
            measured[row["name"]] = figures.get("pruned_bytes_per_param", whole)
    sparsity = np.linspace(0, 0.99, 100)
    for label, (fixed, kept), _, colour, style, _ in _STATE:
        line(
            axes, 100 * sparsity, fixed + kept * (1 - sparsity), style, colour, f"{label} (formula)"
        )
    for label, _, name, colour, _, point in _STATE:
        if name:
            text = f"{label.partition(':')[0]}: {measured[name]:.2f} (measured)"
            line(axes, 90, measured[name], point, colour, text)
    text = f"FlashOptim, all parameters: {measured['flashoptim']:.2f} (measured)"
    line(axes, 90, measured["flashoptim"], "o", "run2", text)
    for at, gigabytes, name in ((0, 80.16, "AxoNN"), (90, 20.28, "AxoNN+SAMO")):
        text = f"{name} 2.7B, all memory: {gigabytes / 2.7:.1f} (printed)"
        line(axes, at, gigabytes / 2.7, "x", "run0", text)
    logarithmic(axes, "y", [0.5, 1, 2, 5, 10, 20])
    axes.set_xticks([0, 25, 50, 80, 90, 99])
    axes.set_xlabel("sparsity, %", fontsize=10)
    side_legend(axes)
    return figure


def breakdown() -> Canvas:
    """Draw the parts of a step of 2.7B: bars of Fig. 8 beside the model's."""
    title = "Where a step of GPT-3 2.7B goes, seconds"
    note = "Left bar of a pair: Fig. 8, digitised. Right bar, hatched: model. Fig. 8's split of compute and messages cannot be true: see the text."
    figure, fit = new(430, title, note), calibrate()
    published = ("compute", "bubble", "messages", "collective", "other")
    names = (*published[:3], "all-reduce", "other (Fig. 8) or compress and update (model)")
    at = [-0.2, 0.2, 0.8, 1.2]
    for axes, gpus in zip(panels(figure, 3, top=84, bottom=90), (128, 256, 512), strict=True):
        axes.set_title(f"{gpus} GPUs", loc="left", fontsize=12, weight="bold")
        bars = []
        for row in (row for row in read("breakdown") if row["gpus"] == gpus):
            ours = fit.parts("2.7B", {"axonn": "dense", "samo": "paper"}[row["system"]], gpus)
            bars += [[row[key] for key in published], [ours[key] for key in PARTS]]
        heights, bottom = np.array(bars).T, np.zeros(4)
        colours = ("run5", "whole", "run4", "run1", "run3")
        for part, name, colour in zip(heights, names, colours, strict=True):
            look: dict[str, Any] = {"edgecolor": "white", "linewidth": 0, "hatch": ["", "///"] * 2}
            axes.bar(at, part, 0.36, bottom, color=LIGHT[colour], label=name, **look)
            bottom += part
        for x, y in zip(at, bottom):
            axes.text(x, y, f"{y:.2f}", ha="center", va="bottom", fontsize=10)
        axes.set_xticks([0, 1], ["AxoNN", "AxoNN+SAMO"])
    legend(figure, axes, 5)
    return figure


def cnn() -> Canvas:
    """Draw the CNN rows, and what a smaller all-reduce alone would save."""
    title = "CNNs on Summit, pure data parallelism, ms a step"
    note = "Points: Fig. 5, digitised. Dashed: AxoNN's points less nine tenths of an all-reduce (model, one flow a node). Printed: the saving."
    figure, rate = new(400, title, note), NODE / calibrate().costs[3] * 1e9
    for axes, model in zip(panels(figure, 2, top=84, bottom=92), ("WideResnet-101", "VGG-19")):
        axes.set_title(model, loc="left", fontsize=12, weight="bold")
        rows = [row for row in read("cnn") if row["model"] == model]
        gpus, dense, samo, params, saved = (
            np.array([row[key] for row in rows])
            for key in ("gpus", "axonn", "samo", "parameters", "reduction")
        )
        line(axes, gpus, dense, "o-", "muted", "AxoNN, digitised")
        line(axes, gpus, samo, "o-", "run0", "AxoNN+SAMO, digitised")
        predicted = dense - 1e3 * 0.9 * 4 * params / rate
        line(axes, gpus, predicted, "--", "run1", "AxoNN+SAMO, model")
        for x, y, percent in zip(gpus, dense, saved):
            axes.text(x, y + 10, f"-{percent:.0f} %", fontsize=10, color=LIGHT["run0"])
        logarithmic(axes, "x", gpus, "GPUs")
        axes.set_ylim(0, 1.15 * dense.max())
    legend(figure, axes, 3)
    return figure


def kernels() -> Canvas:
    """Draw the time of sparse products over that of dense ones."""
    title = "Sparse products over dense ones, 90 % sparse square weight, 576 tokens"
    note = "V100: Fig. 1 of the paper, digitised. H200: measured by us, bf16, torch 2.11, 2026-11-15. Under 1 the sparse product is faster."
    figure, axes = single(420, title, note, right=300)
    for key, colour, name in (("cusparse", "run1", "cuSPARSE"), ("sputnik", "run4", "Sputnik")):
        sizes, ratios = zip(*((row["size"], row[key] / row["cublas"]) for row in read("kernels")))
        line(axes, sizes, ratios, "o--", colour, f"{name}, V100, fp16 (digitised)")
    for key, colour, name in (
        ("csr", "run0", "cuSPARSE CSR"),
        ("bsr 64", "run2", "64 x 64 blocks"),
    ):
        found = [
            (row["parameters"]["size"], row["figures"]["against_dense"])
            for row in results("sparse-vs-dense-h200-2026-11-15")
            if (row["name"], row["parameters"]["tokens"]) == (key, 576)
        ]
        sizes, ratios = zip(*found)
        line(axes, sizes, ratios, "s-", colour, f"{name}, H200, bf16 (measured)")
    axes.axhline(1, color=LIGHT["muted"], linewidth=0.9)
    logarithmic(axes, "x", [2**k for k in range(7, 14)], "size of the weight")
    logarithmic(axes, "y", [0.5, 1, 2, 5, 10, 20, 50, 100])
    side_legend(axes)
    return figure


def clusters() -> Canvas:
    """Draw tokens per second on H100s and on consumer cards, and a step against the network."""
    title = "Past Summit: GPTs at 90 % sparsity, everything modelled by samo.planner"
    note = "Above: H100s, 3,200 Gbit/s a node of 8; 4,096 sequences a step (lines), 4 a GPU (dots). Below: 512 sequences a step; RTX 4090s are one a machine."
    figure, rows = new(660, title, note), answers()
    above, below = panels(figure, 3, top=92, bottom=374), panels(figure, 3, top=376, bottom=98)
    # Dashes may cover other lines.
    looks = {"dense": ("muted", "-"), "samo": ("run1", "-"), "dense, 8-bit state": ("run2", "--"), "samo, lean": ("run3", "--")}  # fmt: skip

    def draw(axes: Axes, question: str, model: str, gbit: int, marker: str = "") -> None:
        for scheme, (colour, style) in looks.items():
            key = (question, model, scheme)
            found = [row for row in rows if (row["question"], row["model"], row["scheme"]) == key]
            found = [row for row in found if row["gbit"] == gbit or not gbit]
            y = [row["seconds"] for row in found]
            if gbit:
                y = [CONTEXT * row["batch"] / row["seconds"] for row in found]
            if gbit == 3200:
                y = [tokens / row["gpus"] for tokens, row in zip(y, found)]
            x = [row["gpus" if gbit else "gbit"] for row in found]
            style = ":" if question == "weak" else f"{marker}{style}"
            line(axes, x, y, style, colour, f"{scheme}, model")

    for axes, model in zip(above, ("13B", "66B", "175B")):
        axes.set_title(f"{model}: tokens/s a GPU", loc="left", fontsize=11, weight="bold")
        draw(axes, "strong", model, 3200)
        draw(axes, "weak", model, 3200)
        logarithmic(axes, "x", [64, 256, 1024, 4096], "GPUs")
        axes.set_ylim(0, None)
    cards = "13B on RTX 4090s, {} Gbit/s: tokens/s"
    names = ("13B on 256 H100s: seconds a step", cards.format(1), cards.format(10))
    for axes, name, gbit in zip(below, names, (0, 1, 10)):
        axes.set_title(name, loc="left", fontsize=11, weight="bold")
        draw(axes, "consumer" if gbit else "network", "13B", gbit, "o")
        if gbit:
            logarithmic(axes, "x", [1, 4, 16, 64, 256], "GPUs")
        else:
            logarithmic(axes, "x", [10, 100, 400, 3200], "Gbit/s of a node of 8")
        logarithmic(axes, "y", [1e3, 1e4, 1e5] if gbit else [0.5, 1, 2, 5, 10])
    legend(figure, below[2], 4)
    return figure


FIGURES: dict[str, Callable[[], Canvas]] = {
    one.__name__: one for one in (scaling, memory, breakdown, cnn, kernels, clusters)
}


def save(folder: Path) -> None:
    """Draw all figures; 256 colours make files of a third of the size."""
    for name, draw in FIGURES.items():
        with drawing():
            picture = Image.open(io.BytesIO(to_png(draw()))).convert("RGB")
        small = picture.quantize(256, Image.Quantize.MAXCOVERAGE)
        small.save(folder / f"{name}.png", optimize=True)
