"""Write the report: one self-contained HTML file from ``template.html`` and ``style.css``."""

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

from samo.errors import ConfigError, RunError, SamoError
from samo.report import figures, findings, theme
from samo.report.memory_bars import bars
from samo.report.runs import Run, read_runs
from samo.utils import atomic_io, formatting

__all__ = []

_SECTIONS: Final = ("model", "data", "hardware", "ranks", "versions")
"""What the page lists of run.json besides the settings."""


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write a page about one or several runs.

    Example:
        >>> import json, pathlib, tempfile
        >>> from samo.report.page import write_report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = pathlib.Path(folder)
        ...     about = {"format": "samo-run", "version": 1, "name": "notes"}
        ...     _ = (run / "run.json").write_text(json.dumps(about))
        ...     page = write_report([run], run / "report.html")
        ...     "<h1>notes</h1>" in page.read_text()
        True

    Equal runs give equal files, byte for byte.

    Args:
        runs: Run folders, in the order they are to be shown.
        out: The page to write; its folder must exist.

    Raises:
        ConfigError: No run is given, or ``out`` is not named ``.html``.
        RunError: A run cannot be read, or the report cannot be written.
    """
    out = Path(out)
    if not runs:
        raise ConfigError("no run to report on; pass one or more folders that 'samo train' wrote")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"a report is an HTML file, got '{out}'; pass a name that ends in .html")
    shown = read_runs(runs)
    if not os.path.isdir(out.parent):  # unlike Path's own, never an OSError
        raise RunError(f"cannot write '{out}': there is no folder '{out.parent}'; create it first")
    if os.path.isdir(out):
        raise RunError(f"cannot write '{out}': it is a folder; pass the name of a file")
    page = _render(shown)
    try:
        atomic_io.write_bytes(out, page.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(
            f"cannot write '{out}': {error.strerror or error}; pass a place that can be written to"
        ) from None
    return out


def _render(runs: Sequence[Run]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names, settings and samples are not ours
        finalize=lambda value: value if isinstance(value, Markup) else formatting.plain(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    names = itertools.count()

    def figure(kind: str, content: object) -> Markup:
        with theme.drawing(f"{kind}{next(names)}"):
            return Markup(theme.to_svg(getattr(figures, f"{kind}_figure")(content)))

    found = bars(runs)
    settings = [_flat(run.section("config")) for run in runs]
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = [(key, [each.get(key, formatting.NOTHING) for each in settings]) for key in keys]
    return environment.get_template("template.html").render(
        runs=runs,
        bars=found,
        kinds=[kind for kind in theme.KIND_NAMES if any(bar.kinds.get(kind) for bar in found)],
        masks=_masks(runs),
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


def _masks(runs: Sequence[Run]) -> list[tuple[list[str], Mapping[str, tuple[int, int]] | str]]:
    """Read each different set of masks once.

    Returns:
        The labels of its runs, and kept weights and all weights of each tensor, or what is wrong.
    """
    from samo.checkpoint.load import load_masks  # imports torch

    found: dict[str, tuple[list[str], Mapping[str, tuple[int, int]] | str]] = {}
    for run in runs:
        path = run.path / "masks.safetensors"
        if not run.prune or not path.exists():
            continue
        try:
            masks = load_masks(path)
            sizes = {name: (mask.kept, mask.numel) for name, mask in masks.items()}
            found.setdefault(masks.fingerprint(), ([], sizes))[0].append(run.label)
        except (SamoError, OSError) as error:
            found[str(error)] = ([run.label], str(error))
    return list(found.values())


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
