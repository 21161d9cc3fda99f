"""``samo bench step`` with more contenders: budgets of resident weights, and other projects.

    python -m benchmarks.step --only masked,samo,autocast,flashoptim --shape gpt3-2.7b

Takes the options of ``samo bench step``; ``contenders.py`` has the further contenders.
"""

import sys
from collections.abc import Sequence

from benchmarks.contenders import CONTENDERS as MORE
from samo.bench.contenders import CONTENDERS
from samo.bench.settings import StepConfig, command_line
from samo.cli.main import main as samo_main

__all__ = ["command", "main"]


def command(config: StepConfig) -> str:
    """Return the command with these settings, without defaults.

    Example:
        >>> command(StepConfig(only=("samo",)))
        'python -m benchmarks.step --only samo'
    """
    return command_line(config).replace("samo bench step", "python -m benchmarks.step", 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, with all contenders to choose from."""
    CONTENDERS.update(MORE)
    return samo_main(["bench", "step", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
