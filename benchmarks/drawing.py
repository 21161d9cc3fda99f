"""The look of all figures of the benchmarks: colours, sizes in pixels, PNG and SVG."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

__all__ = []

Figure = tuple[bytes, str]
"""A picture as PNG and as SVG."""

LIGHT: Final = {
    "page": "#fdfdfc",
    "line": "#e3e3de",
    "ink": "#1d2126",
    "muted": "#666d76",
    "whole": "#a9adb2",
    **{  # Okabe and Ito: distinct to the colour-blind
        "run0": "#0072b2",
        "run1": "#d55e00",
        "run2": "#009e73",
        "run3": "#b35c8e",
        "run4": "#c98600",
        "run5": "#3d9fd6",
    },
}
_RC: Final[dict[Any, Any]] = {
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: equal widths on every machine
    "font.size": 12.0,
    "text.parse_math": False,
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["muted"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "ytick.major.size": 0.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "samo",
}
_DPI: Final = 72


@contextmanager
def drawing() -> Iterator[None]:
    """Draw with this look, whatever the user's matplotlib settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def new_figure(width: float, height: float) -> Canvas:
    """Return an empty figure of a size in pixels."""
    return Canvas(figsize=(width / _DPI, height / _DPI), dpi=_DPI)


def place(figure: Canvas, *, left: float, right: float, top: float, bottom: float) -> Axes:
    """Add axes to a figure with margins in pixels."""
    width, height = figure.get_size_inches() * _DPI
    sizes = (width - left - right) / width, (height - top - bottom) / height
    return figure.add_axes((left / width, bottom / height, *sizes))


def run_colour(number: int) -> str:
    """Return the colour of a curve."""
    return LIGHT[f"run{number % 6}"]


def run_dashes(number: int) -> str:
    """Return the line style of a curve: dashed from the seventh on, then dotted."""
    return ("-", "--", ":")[number // 6 % 3]


def to_png(figure: Canvas) -> bytes:
    """Return a figure as a PNG at twice its size."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=2 * _DPI, facecolor="#ffffff")
    return buffer.getvalue()


def to_svg(figure: Canvas) -> str:
    """Return a figure as SVG, the same for the same data."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def apart(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move the places of labels apart until no two are closer than ``gap``.

    Example:
        >>> apart([5.0, 5.0, 9.0], gap=2.0, low=0.0, high=10.0)
        [4.0, 6.0, 9.0]
    """
    gap = min(gap, (high - low) / max(len(values), 1))
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    groups: list[tuple[float, int]] = []  # centre and number of labels that touch each other
    for i in order:
        centre, size = min(max(values[i], low), high), 1
        while groups and groups[-1][0] + gap * (groups[-1][1] + size) / 2 > centre:
            before, number = groups.pop()
            centre = (before * number + centre * size) / (number + size)
            size += number
            half = gap * (size - 1) / 2
            centre = min(max(centre, low + half), high - half)
        groups.append((centre, size))
    places = [centre + gap * (k - (size - 1) / 2) for centre, size in groups for k in range(size)]
    return [at for _, at in sorted(zip(order, places))]
