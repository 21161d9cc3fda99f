"""``samo report``: the page of a run or of several."""

import sys
from pathlib import Path

from samo.cli.commands import Report
from samo.report.page import write_report

__all__ = []


def run(command: Report) -> int:
    """Write the page, and print its path."""
    out = command.out or Path(*command.runs[:1], "report.html")
    sys.stdout.write(f"{write_report(command.runs, out)}\n")
    return 0
