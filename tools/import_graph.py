"""Draw which package of samo imports which.

    python -m tools.import_graph docs/packages.svg

`LAYERS` is the architecture; tests/test_structure.py holds the code to it.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).parents[1] / "src"

LAYERS: Final = (
    {"mask", "models"},
    {"kernels"},
    {"core"},
    {"distributed", "pruning"},
    {"pipeline"},
    {"checkpoint", "memory", "planner"},
    {"data", "integrations", "train"},
    {"bench", "cli", "report"},
)
"""Packages, lowest first: each imports from those below, and from its neighbours without a cycle.
Every package may import `samo.errors` and `samo.utils`."""


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of samo that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("samo."))
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "samo":
                yield from (f"samo.{alias.name}" for alias in node.names)
            elif node.module.startswith("samo."):
                yield node.module


@cache
def edges() -> Counter[tuple[str, str]]:
    """Count the imports between packages, without those of `errors` and `utils`."""
    packages = set().union(*LAYERS)
    found: Counter[tuple[str, str]] = Counter()
    for path in SOURCE.rglob("*.py"):
        importer = path.relative_to(SOURCE / "samo").parts[0]
        for name in imports(path):
            imported = name.split(".")[1]
            if importer in packages and imported in packages and imported != importer:
                found[importer, imported] += 1
    return found


def main(target: Path) -> None:
    """Write the figure."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "samo"  # the same bytes each time
    figure, axes = plt.subplots(figsize=(8, 7.2))
    places = {}
    for level, layer in enumerate(LAYERS):
        names = sorted(layer)
        for index, name in enumerate(names):
            places[name] = ((index - (len(names) - 1) / 2) * 2.6, level)
    found = edges()
    for (importer, imported), count in sorted(found.items()):
        # Pale where another package in between is imported as well.
        is_pale = any((importer, name) in found and (name, imported) in found for name in places)
        (x0, y0), (x1, y1) = places[importer], places[imported]
        bend = 0.0 if y0 - y1 == 1 else 0.06 * (y0 - y1) * (1 if x0 + x1 >= 0 else -1)
        axes.annotate(
            "",
            (x1, y1 + 0.24 if y0 != y1 else y1),
            (x0, y0 - 0.24 if y0 != y1 else y0),
            arrowprops={
                "arrowstyle": "-|>",
                "lw": 0.5 + min(count, 12) / 8,
                "color": "#7a8794",
                "alpha": 0.25 if is_pale else 0.9,
                "shrinkA": 0 if y0 != y1 else 30,
                "shrinkB": 0 if y0 != y1 else 30,
                "connectionstyle": f"arc3,rad={bend}",
            },
            zorder=1,
        )
    for name, (x, y) in places.items():
        box = {"boxstyle": "round,pad=0.45", "fc": "#e8f0fe", "ec": "#3b6fb6", "lw": 1.2}
        axes.text(x, y, name, ha="center", va="center", bbox=box, zorder=2, fontsize=11)
    axes.set_xlim(-4.4, 4.4)
    axes.set_ylim(-0.6, len(LAYERS) - 0.4)
    axes.set_axis_off()
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
