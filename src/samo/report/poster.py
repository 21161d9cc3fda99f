"""The picture beside the page: loss, memory and throughput in one, for a README or a talk."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from samo.memory.predict import KINDS
from samo.report import findings
from samo.report.figures import WIDE, draw_loss, draw_memory, draw_throughput, label_room
from samo.report.findings import Bar, Entry
from samo.report.theme import KIND_NAMES, LIGHT, new_figure, place
from samo.utils import formatting

__all__ = []

_WIDTH: Final = 1200
_HEIGHT: Final = 675
_MOST_BARS: Final = 8


def poster(shown: Sequence[Entry]) -> Figure:
    """Draw the picture: the losses to the left, memory and throughput to the right."""
    figure = new_figure(_WIDTH, _HEIGHT)
    names = ", ".join(formatting.shortened(entry.label, 24) for entry in shown[:4])
    if len(shown) > 4:
        names += f" and {len(shown) - 4} more"
    _write(figure, names, 36, 34, size=20, weight="bold")
    _write(figure, formatting.shortened(findings.summary(shown), 150), 36, 66, role="muted")
    label = min(18, max(len(entry.label) for entry in shown))
    size = replace(WIDE, label=label)
    end = label_room(size, shown, "00,000")
    loss = place(figure, left=84, right=_WIDTH - 628 + end, top=160, bottom=60)
    _title(figure, findings.loss_finding(shown), 36, 112)
    draw_loss(loss, shown, size)
    bars = _most_telling(findings.bars(shown))
    if bars:
        _memory(figure, bars, shown)
    top = 470 if bars else 160
    speed = place(figure, left=724, right=36 + end, top=top, bottom=60)
    _title(figure, findings.throughput_finding(shown), 676, top - 48)
    draw_throughput(speed, shown, size)
    return figure


def _memory(figure: Figure, bars: Sequence[Bar], shown: Sequence[Entry]) -> None:
    _title(figure, findings.memory_finding(shown), 676, 112)
    x = 676.0
    for kind in KINDS:
        if any(bar.kinds.get(kind) for bar in bars):
            _swatch(figure, x, 146, LIGHT[kind])
            _write(figure, KIND_NAMES[kind], x + 15, 146, role="muted", size=10.5)
            x += 34 + 6.2 * len(KIND_NAMES[kind])
    axes = place(figure, left=860, right=175, top=164, bottom=_HEIGHT - 396)
    draw_memory(
        axes,
        [replace(bar, label=formatting.shortened(bar.label, 26)) for bar in bars],
        is_wide=True,
        text_size=11.5,
    )


def _most_telling(bars: Sequence[Bar]) -> list[Bar]:
    """Keep what fits: first the predictions go, then the last runs."""
    if len(bars) > _MOST_BARS:
        bars = [bar for bar in bars if bar.entry is None or bar.is_measured]
    return list(bars[:_MOST_BARS])


def _title(figure: Figure, text: str, x: float, y: float) -> None:
    size = 13 if len(text) <= 66 else 11.5
    _write(figure, formatting.shortened(text, 84), x, y, size=size, weight="bold")


def _write(
    figure: Figure,
    text: str,
    x: float,
    y: float,
    *,
    role: str = "ink",
    size: float = 12,
    weight: str = "normal",
) -> None:
    figure.text(
        x / _WIDTH,
        1 - y / _HEIGHT,
        text,
        color=LIGHT[role],
        fontsize=size,
        weight=weight,
        va="center",
    )


def _swatch(figure: Figure, x: float, y: float, colour: str) -> None:
    box = Rectangle(
        (x / _WIDTH, 1 - (y + 4.5) / _HEIGHT),
        10 / _WIDTH,
        9 / _HEIGHT,
        facecolor=colour,
        transform=figure.transFigure,
    )
    figure.add_artist(box)
