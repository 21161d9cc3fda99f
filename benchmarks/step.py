"""``samo bench step`` with more contenders: budgets of resident weights, and other projects.

    python -m benchmarks.step --only masked,samo,autocast,flashoptim --shape gpt3-2.7b

Takes the options of ``samo bench step``; ``contenders.py`` has the further contenders.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields

from benchmarks.contenders import CONTENDERS as MORE
from samo.bench.contenders import CONTENDERS
from samo.bench.settings import StepConfig
from samo.cli.main import main as samo_main


def command(config: StepConfig) -> str:
    """Return the command with these settings, without defaults.

    Example:
        >>> command(StepConfig(only=("samo",)))
        'python -m benchmarks.step --only samo'
    """
    words = ["python", "-m", "benchmarks.step"]
    for entry in fields(config):
        value = getattr(config, entry.name)
        if value == entry.default:
            continue
        name = entry.name.replace("_", "-")
        words.append(f"--no-{name}" if value is False else f"--{name}")
        if isinstance(value, tuple):
            words += map(str, value)
        elif not isinstance(value, bool):
            words.append(str(value))
    return shlex.join(words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, with all contenders to choose from."""
    CONTENDERS.update(MORE)
    return samo_main(["bench", "step", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
