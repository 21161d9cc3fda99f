"""One look for every figure: the colours by role, and SVG that follows the page into the dark.

Figures are drawn in the light colours. No two roles share one, so that `to_svg` can put the role
back in its place (``#0072b2`` becomes ``var(--run0)``) and the page's style sheet decides.

Runs have the colours of Okabe and Ito, which the colour-blind can tell apart; a seventh run starts
over with a dashed line. Kinds of memory are shades of slate, so that nobody takes them for runs.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from samo.memory.predict import Kind

__all__ = []

LIGHT: Final = {
    "page": "#fdfdfc",
    "panel": "#f5f5f2",
    "line": "#e3e3de",
    "ink": "#1d2126",
    "muted": "#666d76",
    "run0": "#0072b2",
    "run1": "#d55e00",
    "run2": "#009e73",
    "run3": "#b35c8e",
    "run4": "#c98600",
    "run5": "#3d9fd6",
    "dense": "#33445c",
    "bitmap": "#d1495b",
    "gradients": "#62809e",
    "values": "#98b0c3",
    "moments": "#c3d1dc",
    "corrections": "#c9b79c",
    "ages": "#8a7fa8",
    "buckets": "#7fa88a",
    "whole": "#a9adb2",
    "accent": "#2f7fc1",
}
DARK: Final = {
    "page": "#15181c",
    "panel": "#1d2126",
    "line": "#343a42",
    "ink": "#eceef0",
    "muted": "#9aa3ad",
    "run0": "#4ba6df",
    "run1": "#f08040",
    "run2": "#2cc295",
    "run3": "#e29cc4",
    "run4": "#f0b840",
    "run5": "#a3d8f7",
    "dense": "#dbe6f0",
    "bitmap": "#f06a7c",
    "gradients": "#9db8d1",
    "values": "#6b87a2",
    "moments": "#465c73",
    "corrections": "#8c7a5c",
    "ages": "#8f84b5",
    "buckets": "#84b592",
    "whole": "#6a7077",
    "accent": "#4c9be0",
}

RUN_COLOURS: Final = 6
KIND_NAMES: Final[dict[Kind, str]] = {
    "dense": "dense weights",
    "bitmap": "mask",
    "values": "values",
    "gradients": "gradients",
    "moments": "moments",
    "corrections": "corrections",
    "ages": "ages of entries",
    "buckets": "buckets of DDP",
}

_RC: Final[dict[Any, Any]] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: equal widths on every machine
    "font.size": 12.0,
    "text.parse_math": False,  # a run may be called "$x$"
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["muted"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.8,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.labelsize": 11.0,
    "ytick.labelsize": 11.0,
    "ytick.major.size": 0.0,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "svg.fonttype": "none",  # text stays text: sharp, small, found by the browser's search
}
_NEEDLESS: Final = r"<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</style>\s*</defs>"
_ROLES: Final = {colour: f"var(--{role})" for role, colour in LIGHT.items()}
_DPI: Final = 72  # an SVG unit is a point, so sizes below are CSS pixels


@contextmanager
def drawing(salt: str = "samo") -> Iterator[None]:
    """Draw inside of this: matplotlib's own defaults, our look on top, the user's settings not at all."""
    with warnings.catch_warnings(), matplotlib.rc_context():
        # A name may have letters that the font lacks; a browser finds them elsewhere.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC | {"svg.hashsalt": salt})
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in pixels."""
    return Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)


def place(figure: Figure, *, left: float, right: float, top: float, bottom: float) -> Axes:
    """Add axes to a figure with margins in pixels."""
    width, height = figure.get_size_inches() * _DPI
    return figure.add_axes(
        (
            left / width,
            bottom / height,
            (width - left - right) / width,
            (height - top - bottom) / height,
        )
    )


def run_colour(place: int) -> str:
    """Return the colour of the run at this place."""
    return LIGHT[f"run{place % RUN_COLOURS}"]


def run_dashes(place: int) -> str:
    """Return the line style of the run at this place."""
    return ("-", "--", ":")[place // RUN_COLOURS % 3]


def to_svg(figure: Figure, label: str, name: str) -> str:
    """Return a figure as an ``<svg>`` element for a page that has other figures too.

    Args:
        figure: Drawn within `drawing`.
        label: What it shows, for those who cannot see it; escaped already.
        name: Its name on the page. Ids start with it, since they must not repeat on a page.
    """
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(_NEEDLESS, "", text[text.index("<svg") :].strip(), flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box, "matplotlib's SVG has a viewBox"
    head = f'<svg {box[0]} role="img" aria-label="{label}">'
    # Inside of tags only: a run may be called "#0072b2".
    body = re.sub(r"<[^>]*>", lambda tag: _themed(tag[0], name), text[text.index(">") + 1 :])
    return head + re.sub(r"\s*\n\s*", " ", body)


def _themed(tag: str, name: str) -> str:
    if tag.startswith("<g "):  # nobody refers to groups
        tag = re.sub(r' id="[^"]*"', "", tag)
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', tag).replace("url(#", f"url(#{name}-")
    tag = re.sub("|".join(_ROLES), lambda colour: _ROLES[colour[0]], tag)
    return tag.replace("'DejaVu Sans', sans-serif", "var(--font)")


def to_png(figure: Figure) -> bytes:
    """Return a figure as a PNG at twice its size in pixels."""
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="png", dpi=2 * _DPI, facecolor="#ffffff", metadata={"Software": None}
    )
    return buffer.getvalue()
