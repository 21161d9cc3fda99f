"""Write the tables into README.md and draw the figures: ``python -m benchmarks.paper``."""

import re
from pathlib import Path

from benchmarks.paper import clusters, figures
from benchmarks.paper.tables import TABLES


def with_tables(text: str) -> str:
    """Return a page with the table of each name between its markers."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"the page has no place for '{name}'; add {begin.strip()}{end}")
        text = pattern.sub(lambda _: f"{begin}\n{table()}\n\n{end}", text)  # noqa: B023
    return text


def main() -> None:
    """Write the page and its figures."""
    folder = Path(__file__).parent
    page = folder / "README.md"
    clusters.save()
    page.write_text(with_tables(page.read_text()))
    figures.save(folder / "results")
    print(f"{page} and {', '.join(path.name for path in sorted((folder / 'results').iterdir()))}")


if __name__ == "__main__":
    main()
