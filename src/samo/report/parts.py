"""Parts that the sections of the page share: a section, a figure in two sizes, keys, safe text."""

import html
from collections.abc import Callable, Iterable, Sequence

from matplotlib.figure import Figure

from samo.report.figures import NARROW, WIDE, Size
from samo.report.findings import Entry
from samo.report.theme import RUN_COLOURS, drawing, to_svg
from samo.utils import formatting

__all__ = []


def section(
    topic: str, finding: str, content: str, *, key: Sequence[str] = (), caption: str = ""
) -> Iterable[str]:
    """Yield a section: what it is about, what it shows in a sentence, and the thing itself."""
    heading = f'<p class="eyebrow">{escaped(topic)}</p><h2>{escaped(finding)}</h2>'
    if not finding:
        heading = f"<h2>{escaped(topic)}</h2>"
    keys = f'<ul class="key">{"".join(key)}</ul>' if key else ""
    note = f'<p class="caption">{escaped(caption)}</p>' if caption else ""
    yield f"<section>{heading}{keys}{content}{note}</section>"


def figure(name: str, label: str, draw: Callable[[Size], Figure]) -> str:
    """Draw a figure wide and narrow; the style sheet shows the one that fits."""
    parts = []
    for size in (WIDE, NARROW):
        with drawing(f"{name}-{size.name}"):
            svg = to_svg(draw(size), escaped(label), f"{name}-{size.name}")
        parts.append(f'<div class="figure {size.name}">{svg}</div>')
    return "".join(parts)


def run_key(shown: Sequence[Entry]) -> list[str]:
    """Return the entries of a key that tells runs apart."""
    lines = ("", "dashed", "dotted")  # as `theme.run_dashes` draws them
    return [
        f'<li><i class="{lines[entry.place // RUN_COLOURS % 3]}" style="{colour_of(entry)}"></i>'
        f"{escaped(entry.label)}</li>"
        for entry in shown
    ]


def role(entry: Entry) -> str:
    """Return the variable of the style sheet that has a run's colour."""
    return f"--run{entry.place % RUN_COLOURS}"


def colour_of(entry: Entry) -> str:
    """Return the style that gives an element a run's colour."""
    return f"--colour:var({role(entry)})"


def escaped(value: object) -> str:
    """Write anything as text that HTML takes for nothing else."""
    return html.escape(" ".join(formatting.plain(str(value)).split()))


def listed(names: Sequence[str]) -> str:
    """Join names: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
