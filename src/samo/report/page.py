"""Write the report: one self-contained HTML file from ``template.html`` and ``style.css``."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

from samo.errors import ConfigError, RunError
from samo.report import figures, findings, theme
from samo.report.runs import Run, read_runs
from samo.utils import atomic_io, formatting

_SECTIONS: Final = ("model", "data", "hardware", "ranks", "versions")
"""What the page lists of run.json besides the settings."""


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write a page about one or several runs. Equal runs give equal files, byte for byte."""
    if not runs:
        raise ConfigError("no run to report on; pass a run folder: samo report runs/notes")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out must end in .html, got '{out}'")
    page = _render(read_runs(runs))
    try:
        atomic_io.write_bytes(out, page.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"cannot write '{out}': {error.strerror or error}") from None
    return out


def _render(runs: Sequence[Run]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names, settings and samples may contain anything
        finalize=lambda value: value if isinstance(value, Markup) else formatting.plain(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    names = itertools.count()

    def figure(kind: str, content: object) -> Markup:
        with theme.drawing(f"{kind}{next(names)}"):
            return Markup(theme.to_svg(getattr(figures, f"{kind}_figure")(content)))

    found = findings.bars(runs)
    settings = [_flat(run.section("config")) for run in runs]
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = [(key, [each.get(key, formatting.NOTHING) for each in settings]) for key in keys]
    return environment.get_template("template.html").render(
        runs=runs,
        bars=found,
        kinds=[kind for kind in findings.PARTS if any(bar.kinds.get(kind) for bar in found)],
        figure=figure,
        findings=findings,
        formatting=formatting,
        theme=theme,
        differing=[(key, values) for key, values in rows if len(set(values)) > 1],
        about=[
            {"command": run.about.get("command", ""), "started": run.about.get("started", "")}
            | config
            | _flat({name: run.section(name) for name in _SECTIONS})
            for run, config in zip(runs, settings)
        ],
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as ``optim.lr`` and their values as text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value != "":
            is_large = type(value) is int and abs(value) >= 10_000
            flat[f"{prefix}{key}"] = f"{value:,}" if is_large else str(value)
    return flat
