"""``samo report``: the page of one run or of several."""

import sys

from samo.cli.commands import Report
from samo.errors import ConfigError
from samo.report.page import write_report

__all__ = []


def run(command: Report) -> int:
    """Write the page, and print its path."""
    if not command.runs:
        raise ConfigError("no run to report on; name a run folder: samo report runs/notes")
    page = write_report(command.runs, command.out or command.runs[0] / "report.html")
    sys.stdout.write(f"{page}\n")
    return 0
