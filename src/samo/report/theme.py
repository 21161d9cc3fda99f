"""The look of every figure: colours by role, matplotlib's settings, and export to SVG.

Figures are drawn in the light colours. No two roles share one, so `to_svg` can replace a colour by
the CSS variable of its role (``#0072b2`` by ``var(--run0)``), defined for light and dark pages.

Runs have the colours of Okabe and Ito, which are safe for colour-blind readers; a seventh run
starts over with a dashed line.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

_COLOURS: Final = {
    "page": ("#fdfdfc", "#15181c"),
    "panel": ("#f5f5f2", "#1d2126"),
    "line": ("#e3e3de", "#343a42"),
    "ink": ("#1d2126", "#eceef0"),
    "muted": ("#666d76", "#9aa3ad"),
    "run0": ("#0072b2", "#4ba6df"),
    "run1": ("#d55e00", "#f08040"),
    "run2": ("#009e73", "#2cc295"),
    "run3": ("#b35c8e", "#e29cc4"),
    "run4": ("#c98600", "#f0b840"),
    "run5": ("#3d9fd6", "#a3d8f7"),
    "dense": ("#33445c", "#dbe6f0"),
    "bitmap": ("#d1495b", "#f06a7c"),
    "gradients": ("#62809e", "#9db8d1"),
    "values": ("#98b0c3", "#6b87a2"),
    "moments": ("#c3d1dc", "#465c73"),
    "corrections": ("#c9b79c", "#8c7a5c"),
    "ages": ("#8a7fa8", "#8f84b5"),
    "buckets": ("#7fa88a", "#84b592"),
    "whole": ("#a9adb2", "#6a7077"),
}
LIGHT: Final = {role: light for role, (light, _) in _COLOURS.items()}
DARK: Final = {role: dark for role, (_, dark) in _COLOURS.items()}

RUN_COLOURS: Final = 6

_RC: Final[dict[Any, Any]] = {
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: equal widths on every machine
    "font.size": 12.0,
    "text.parse_math": False,  # a run may be called "$x$"
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["muted"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "grid.color": LIGHT["line"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.labelsize": 11.0,
    "ytick.labelsize": 11.0,
    "ytick.major.size": 0.0,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "path.simplify_threshold": 0.5,  # pixels: a curve of 100,000 points becomes 90 kB of SVG
    "svg.fonttype": "none",  # text stays text: sharp, small, found by the browser's search
}
_WIDTH: Final = 760
_DPI: Final = 72  # an SVG unit is a point, so sizes below are CSS pixels


@contextmanager
def drawing(salt: str = "samo") -> Iterator[None]:
    """Apply the look, whatever the user's settings; ``salt`` makes the ids in an SVG unique."""
    with warnings.catch_warnings(), matplotlib.rc_context():
        # A name may have characters that the font lacks; browsers substitute another font.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC | {"svg.hashsalt": salt})
        yield


def new_figure(
    height: float, *, left: float, right: float, top: float, bottom: float
) -> tuple[Figure, Axes]:
    """Return a figure, and its axes with margins in pixels."""
    figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI)
    size = (_WIDTH - left - right) / _WIDTH, (height - top - bottom) / height
    return figure, figure.add_axes((left / _WIDTH, bottom / height, *size))


def run_colour(place: int) -> str:
    """Return the colour of the run at this place."""
    return LIGHT[f"run{place % RUN_COLOURS}"]


def run_dashes(place: int) -> str:
    """Return the line style of the run at this place."""
    return ("-", "--", ":")[place // RUN_COLOURS % 3]


def to_svg(figure: Figure) -> str:
    """Return a figure as an ``<svg>`` element whose colours are CSS variables of the page."""
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = re.sub('<g id="[^"]*"', "<g", svg[svg.index("<svg") :])  # ids of groups repeat on a page
    for role, colour in LIGHT.items():
        svg = svg.replace(f": {colour}", f": var(--{role})")
    return svg
