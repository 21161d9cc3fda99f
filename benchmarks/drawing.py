"""Figures of the benchmarks, in the look of the report: sizes in pixels, PNG and SVG."""

import io
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from samo.report.theme import LIGHT, drawing, run_colour, run_dashes
from samo.utils import atomic_io

__all__ = [
    "LIGHT",
    "Figure",
    "drawing",
    "new_figure",
    "place",
    "run_colour",
    "run_dashes",
    "to_png",
    "to_svg",
    "write_figure",
]

Figure = tuple[bytes, str]
"""A picture as PNG and as SVG."""

_DPI: Final = 72


def new_figure(width: float, height: float) -> Canvas:
    """Return an empty figure of a size in pixels."""
    return Canvas(figsize=(width / _DPI, height / _DPI), dpi=_DPI)


def place(figure: Canvas, *, left: float, right: float, top: float, bottom: float) -> Axes:
    """Add axes to a figure with margins in pixels."""
    width, height = figure.get_size_inches() * _DPI
    sizes = (width - left - right) / width, (height - top - bottom) / height
    return figure.add_axes((left / width, bottom / height, *sizes))


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


def write_figure(figure: Figure, folder: Path, name: str) -> None:
    """Write NAME.png and NAME.svg."""
    png, svg = figure
    atomic_io.write_bytes(folder / f"{name}.png", png)
    atomic_io.write_bytes(folder / f"{name}.svg", svg.encode())
