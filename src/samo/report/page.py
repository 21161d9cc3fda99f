"""Write the report: one HTML file that needs nothing else, and one picture for a README or a talk."""

import os
from collections.abc import Sequence
from pathlib import Path

from samo.errors import ConfigError, RunError
from samo.report import findings, mask_sections, sections
from samo.report.css import style_sheet
from samo.report.findings import Entry
from samo.report.mask_pictures import MaskView, read_masks
from samo.report.parts import escaped, listed
from samo.report.poster import poster
from samo.report.runs import read_run
from samo.report.theme import drawing, to_png
from samo.utils import atomic_io

__all__ = []


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write a page about one or several runs, and a picture of the same name beside it.

    Example:
        >>> import json, pathlib, tempfile
        >>> from samo.report.page import write_report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = pathlib.Path(folder)
        ...     about = {"format": "samo-run", "version": 1, "name": "notes"}
        ...     _ = (run / "run.json").write_text(json.dumps(about))
        ...     page = write_report([run], run / "report.html")
        ...     page.name, (run / "report.png").exists(), "<h1>notes</h1>" in page.read_text()
        ('report.html', True, True)

    Equal runs give equal files, byte for byte.

    Args:
        runs: Run folders, in the order they are to be shown.
        out: The page to write; its folder must exist.

    Raises:
        ConfigError: No run is given, or ``out`` is not named ``.html``.
        RunError: A run cannot be read, or the report cannot be written.
    """
    out = Path(out)
    _check_names(runs, out)
    shown = findings.entries([read_run(path) for path in runs])
    _check_place(out)
    masks = [read_masks(entry.run.path) if entry.run.prune else "" for entry in shown]
    page = _page(shown, masks)
    with drawing():
        picture = to_png(poster(shown))
    _write(out, page.encode("utf-8", "replace"))
    _write(out.with_suffix(".png"), picture)
    return out


def _check_names(runs: Sequence[Path], out: Path) -> None:
    if not runs:
        raise ConfigError("no run to report on; give one or more folders that 'samo train' wrote")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"a report is an HTML file with a picture beside it, got '{out}'; give a name that ends "
            "in .html"
        )


def _check_place(out: Path) -> None:
    """Refuse what cannot end well before the drawing starts."""
    if not os.path.isdir(out.parent):  # unlike Path's own, never an OSError
        raise RunError(f"cannot write '{out}': there is no folder '{out.parent}'; create it first")
    if os.path.isdir(out):
        raise RunError(f"cannot write '{out}': it is a folder; give the name of a file")


def _write(path: Path, content: bytes) -> None:
    try:
        atomic_io.write_bytes(path, content)
    except OSError as error:
        raise RunError(
            f"cannot write '{path}': {error.strerror or error}; give a place that can be written to"
        ) from None


def _page(shown: Sequence[Entry], masks: Sequence[MaskView | str]) -> str:
    title = f"{len(shown)} runs"
    if len(shown) < 4:
        title = listed([entry.label for entry in shown])
    parts = [
        "<header>",
        '<p class="eyebrow">samo training report</p>',
        f"<h1>{escaped(title)}</h1>",
        f'<p class="summary">{escaped(findings.summary(shown))}</p>',
        *sections.warnings(shown),
        "</header>",
        '<section class="cards">',
        *map(sections.card, shown),
        "</section>",
        *sections.loss(shown),
        *sections.memory(shown),
        *sections.throughput(shown),
        *mask_sections.tickets(shown),
        *mask_sections.changes(shown),
        *sections.masks(shown, masks),
        *sections.comparison(shown),
        *sections.samples(shown),
        *sections.settings(shown),
        *sections.method(shown),
        f"<footer>{escaped(sections.origin(shown))}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'  # or a browser asks the server for one
        f"<title>{escaped(title)} - samo report</title>\n"
        f"<style>{style_sheet()}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
    )
