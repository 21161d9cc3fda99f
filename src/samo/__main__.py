"""``python -m samo``: the same as the command ``samo``."""

import sys

from samo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
