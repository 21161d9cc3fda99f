"""Rules of the code base that no linter checks: layers, examples, lean imports, documents."""

import ast
import graphlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Final

import pytest
from tools.import_graph import LAYERS, edges, imports as imported

import samo
from tests.meters import ignores_dynamo

ROOT: Final = Path(__file__).parent.parent
SOURCE: Final = ROOT / "src"

ONLY_IN: Final = {
    "jinja2": "samo.report",
    "matplotlib": "samo.report",
    "numba": "samo.kernels",
    "pyarrow": "samo.data.arrow_files",
    "rich": "samo.cli",
    "tensorboard": "samo.train.metrics",
    "tokenizers": "samo.data.tokenizers",
    "transformers": "samo.integrations",
    "triton": "samo.kernels",
}
"""Heavy or optional packages, and the only module or package that may import them."""

LEAN: Final = (
    "samo.memory.predict, samo.utils.atomic_io, samo.pipeline.engine, samo.cli.main, "
    "samo.planner.simulator, samo.planner.answer, samo.planner.render, samo.cli.plan, "
    "samo.checkpoint, samo.report.findings"
)
"""Modules that load without torch."""

HEAVY: Final = {"torch", "numba", "triton", "transformers", "rich", "matplotlib"}

PAGES: Final = sorted([*ROOT.glob("README.md"), *(ROOT / "docs").rglob("*.md")])
"""The documents whose code is run."""
DOCUMENTS: Final = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")})


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


TREES: Final = {module_name(path): parse(path) for path in sorted(SOURCE.rglob("*.py"))}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(node: ast.AST, *, deferred: bool = True) -> Iterator[str]:
    """Yield what is imported; without ``deferred``, only what loads together with the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parent = node.module or ""
        for full in (f"{parent}.{alias.name}" for alias in node.names):
            if full != "samo.__version__":  # a constant, there before anything is imported
                yield full if full in TREES else parent
    elif deferred or not is_deferred(node):
        for child in ast.iter_child_nodes(node):
            yield from imports(child, deferred=deferred)


def is_deferred(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


# Public names


@pytest.mark.parametrize("name", samo.__all__)
def test_a_public_name_has_an_example(name: str) -> None:
    value = getattr(samo, name)
    if inspect.isclass(value) and issubclass(value, Exception):
        return  # users catch it; its name and its docstring say enough
    methods, properties = {name: value.__doc__}, {}
    for attribute, member in vars(value).items() if inspect.isclass(value) else ():
        if attribute.startswith("_"):
            continue
        if inspect.isfunction(member) or isinstance(member, classmethod | staticmethod):
            methods[f"{name}.{attribute}"] = member.__doc__
        elif isinstance(member, property | cached_property):
            properties[f"{name}.{attribute}"] = member.__doc__
    # A method that one sentence explains needs no example.
    without = [
        key
        for key, text in methods.items()
        if ">>>" not in (text or "") and (key == name or "\n" in (text or "\n"))
    ]
    assert not without, f"no example in the docstrings of {without}"
    assert all(properties.values()), f"no docstring in {properties}"


def test_samo_lists_its_names_and_knows_no_others() -> None:
    assert set(samo.__all__) < set(dir(samo))
    with pytest.raises(AttributeError, match="module 'samo' has no attribute 'prnue'"):
        _ = samo.prnue


def test_lean_modules_load_nothing_heavy() -> None:
    code = f"import sys, {LEAN}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


# Modules


def test_packages_import_from_the_layers_below() -> None:
    height = {name: level for level, layer in enumerate(LAYERS) for name in layer}
    folders = {path.parent.name for path in (SOURCE / "samo").glob("*/__init__.py")}
    assert folders - {"utils"} == set(height), "a package without a layer, or a layer without it"
    assert not {edge for edge in edges() if height[edge[0]] < height[edge[1]]}, "upward imports"
    graph = {name: {b for a, b in edges() if a == name} for name in height}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
    for path in [SOURCE / "samo" / "errors.py", *(SOURCE / "samo" / "utils").glob("*.py")]:
        assert {name.split(".")[1] for name in imported(path)} <= {"errors", "utils", "__version__"}


def test_modules_import_without_a_cycle() -> None:
    graph = {
        module: {name for name in imports(tree, deferred=False) if name in TREES}
        for module, tree in TREES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_special_packages_are_imported_in_one_place() -> None:
    wrong = [
        f"{module} imports {name}, only {allowed} may"
        for module, tree in TREES.items()
        for name in imports(tree)
        if (allowed := ONLY_IN.get(name.split(".")[0]))
        and not f"{module}.".startswith(f"{allowed}.")
    ]
    assert not wrong


def test_nothing_from_files_or_peers_is_unpickled() -> None:
    unpickles = re.compile(r"(torch\.load|pickle\.loads?|\w+_object|eval|exec)")
    for module, tree in TREES.items():
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not [call for call in calls if unpickles.fullmatch(call)], module


def test_no_string_is_lost() -> None:
    """Find the second half of a message on a line of its own, which no linter does."""
    for file in [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.Module | ast.ClassDef):
                continue  # there a string explains the line above it
            docstring = node.body[0] if isinstance(node, ast.FunctionDef) else None
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    is_text = isinstance(child.value.value, str) and child is not docstring
                    assert not is_text, f"{relative(file)}:{child.lineno}"


# Documents


def code_blocks(text: str) -> Iterator[str]:
    """Yield the Python blocks of a page, moved down to their line so that tracebacks are right."""
    for match in re.finditer(r"^( *)```python\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        yield "\n" * text.count("\n", 0, match.start(2)) + textwrap.dedent(match[2])


# What blocks leave behind, never freed: DDP's destructor joins gloo's threads with the GIL held,
# and hangs if one of them needs it to let go of the last collective.
RAN: list[dict[str, object]] = []


@ignores_dynamo
@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, block in enumerate(code_blocks(page.read_text(encoding="utf-8"))):
        folder = tmp_path / f"{number}"  # each block runs alone, as a reader copies it
        folder.mkdir()
        monkeypatch.chdir(folder)
        RAN.append({"__name__": "__main__"})
        exec(compile(block, page, "exec"), RAN[-1])


def links(text: str) -> Iterator[str]:
    """Yield the targets of a page's links and pictures that point into the project."""
    prose = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    for pattern in (r"\]\(([^)\s]+)", r"^\[[^\]]+\]:\s*(\S+)", r'(?:href|src)="([^"]+)"'):
        for target in re.findall(pattern, prose, re.MULTILINE):
            if not re.match(r"[a-z]+:", target):
                yield target


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in headings}


def test_links_resolve() -> None:
    assert len(list(links((ROOT / "README.md").read_text(encoding="utf-8")))) > 5
    for page in DOCUMENTS:
        for target in links(page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{relative(page)}: {target}"
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file), f"{relative(page)}: {target}"
