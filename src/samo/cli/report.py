"""``samo report``: the page of a run or of several."""

import os
import sys
from pathlib import Path

from samo.cli.commands import Report
from samo.report.page import write_report


def run(command: Report) -> int:
    """Write the page, by default into the folder that the runs share, and print its path."""
    is_absolute = any(path.is_absolute() for path in command.runs)
    paths = [path.absolute() if is_absolute else path for path in command.runs]
    out = command.out or Path(os.path.commonpath(paths) if paths else "", "report.html")
    sys.stdout.write(f"{write_report(command.runs, out)}\n")
    return 0
