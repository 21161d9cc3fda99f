"""The promises of the house that no linter checks: layers, examples, lean imports, documents."""

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
    "rich": "samo.cli",
    "tensorboard": "samo.train.metrics",
    "tokenizers": "samo.data.tokenizers",
    "transformers": "samo.integrations.model_folders",
    "triton": "samo.kernels",
}
"""What is heavy or not everywhere, and the module or package that alone may import it."""

HEAVY: Final = {"torch", "numba", "triton", "transformers"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


MODULES: Final = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
TREES: Final = {name: parse(path) for name, path in MODULES.items()}

PAGES: Final = sorted([*ROOT.glob("README.md"), *(ROOT / "docs").rglob("*.md")])
"""The documents whose code is run."""
DOCUMENTS: Final = sorted([*{*PAGES, *ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")}])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(node: ast.AST, *, deferred: bool = True) -> Iterator[tuple[int, str]]:
    """Yield line and name of what is imported, modules by their full name.

    Without ``deferred``, only what is imported when the module loads: nothing inside functions or
    for the type checker alone.
    """
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
        parent = "." * node.level + (node.module or "")
        for full in (f"{parent}.{alias.name}" for alias in node.names):
            if full != "samo.__version__":  # a constant, there before anything is imported
                yield node.lineno, full if full in MODULES else parent
    elif deferred or not is_deferred(node):
        for child in ast.iter_child_nodes(node):
            yield from imports(child, deferred=deferred)


def is_deferred(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


# The public names


@pytest.mark.parametrize("name", samo.__all__)
def test_a_public_name_loads_and_shows_an_example(name: str) -> None:
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
    without = [what for what, text in methods.items() if not has_example(text)]
    assert not without, f"no 'Example:' with '>>>' in the docstrings of {without}"
    without = [what for what, text in properties.items() if not text]
    assert not without, f"no docstring in {without}"


def has_example(text: str | None) -> bool:
    return ">>>" in (text or "").partition("Example:")[2]


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'samo' has no attribute 'prnue'"):
        _ = samo.prnue


def test_dir_lists_the_public_names() -> None:
    assert set(samo.__all__) < set(dir(samo))


@pytest.mark.parametrize(
    "module",
    [
        "samo",
        "samo.errors",
        "samo.memory.predict",
        "samo.utils.atomic_io",
        "samo.checkpoint",
        "samo.pipeline.engine",
    ],
)
def test_counting_bytes_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.split())


# The modules


def test_packages_import_from_the_layers_below() -> None:
    height = {name: level for level, layer in enumerate(LAYERS) for name in layer}
    folders = {path.parent.name for path in (SOURCE / "samo").glob("*/__init__.py")}
    assert folders - {"utils"} == set(height), "a package without a layer, or a layer without it"
    assert not {edge for edge in edges() if height[edge[0]] < height[edge[1]]}, "upward imports"
    graph = {name: {b for a, b in edges() if a == name} for name in height}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_foundation_stands_on_nothing() -> None:
    for path in [SOURCE / "samo" / "errors.py", *(SOURCE / "samo" / "utils").glob("*.py")]:
        assert {name.split(".")[1] for name in imported(path)} <= {"errors", "utils", "__version__"}


def test_modules_import_without_a_circle() -> None:
    graph = {
        module: {name for _, name in imports(tree, deferred=False) if name in MODULES}
        for module, tree in TREES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_predictions_stand_on_errors_alone() -> None:
    ours = {name for _, name in imports(TREES["samo.memory.predict"]) if name.startswith("samo")}
    assert ours <= {"samo.errors"}


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_special_package_is_imported_in_one_place(package: str) -> None:
    allowed = ONLY_IN[package]
    wrong = [
        f"{relative(MODULES[module])}:{line}"
        for module, tree in TREES.items()
        for line, name in imports(tree)
        if name.split(".")[0] == package and not f"{module}.".startswith(f"{allowed}.")
    ]
    assert not wrong, f"only {allowed} imports {package}"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is_and_what_is_public(module: str) -> None:
    tree = TREES[module]
    names = [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    assert ast.get_docstring(tree), "no docstring"
    assert "__all__" in names, "no __all__"


# Lost strings: `assert x, "a"` and on the next line `"b"` drops "b", and no linter says so


def lost_strings(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each string statement that documents nothing."""
    for node in ast.walk(tree):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if not isinstance(statements, list):
                continue  # the body of a lambda or of a conditional expression
            for before, statement in zip([None, *statements], statements):
                if is_string(statement) and not is_docstring(node, block, before, statement):
                    yield statement.lineno


def is_string(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and (
        isinstance(statement.value, ast.JoinedStr)
        or (isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str))
    )


def is_docstring(node: ast.AST, block: str, before: ast.stmt | None, statement: ast.stmt) -> bool:
    if block != "body" or isinstance(getattr(statement, "value", None), ast.JoinedStr):
        return False
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return before is None
    if isinstance(node, ast.Module | ast.ClassDef):  # its own, or that of the attribute above
        return before is None or isinstance(before, ast.Assign | ast.AnnAssign)
    return False


@pytest.mark.parametrize(
    "file", sorted([*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]), ids=relative
)
def test_no_string_is_lost(file: Path) -> None:
    assert not [f"{relative(file)}:{line}" for line in lost_strings(parse(file))]


def test_lost_strings_are_found_and_docstrings_left_alone() -> None:
    code = '''
        """Module."""
        LIMIT = 3
        """Attribute."""
        class A:
            """Class."""
            size: int = 0
            """Attribute."""
            def f(self):
                """Method."""
                assert self, "half"
                "lost, line 12"
                if self:
                    "lost, line 14"
                else:
                    f"lost, line 16 {self}"
                try:
                    pass
                except ValueError:
                    "lost, line 20"
        def g():
            size = 0
            "lost, line 23"
    '''
    found = sorted(lost_strings(ast.parse(textwrap.dedent(code))))
    assert found == [12, 14, 16, 20, 23]


# The documents


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


def code_blocks(text: str) -> Iterator[str]:
    """Yield the Python blocks of a page, moved down to their line so that tracebacks are right."""
    for match in re.finditer(r"^( *)```python\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start(2))
        yield "\n" * line + textwrap.dedent(match[2])


@ignores_dynamo
@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in code_blocks(page.read_text(encoding="utf-8")):
        exec(compile(block, page, "exec"), namespace)


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


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_the_links_of_a_page_resolve(page: Path) -> None:
    broken = []
    for target in links(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_code_blocks_and_links_are_found() -> None:
    text = textwrap.dedent(
        """
        See [the guide](docs/guide.md#first-steps "Guide"), `[not](this.md)`, [web](https://x.org).

        ```python
        x = [a](b)
        ```

        - a list

          ```python
          y = 1
          ```

        ![picture](figure.svg) and <img src="other.svg">

        [ref]: notes.md
        """
    )
    assert [block.strip() for block in code_blocks(text)] == ["x = [a](b)", "y = 1"]
    assert [block.count("\n") - 1 for block in code_blocks(text)] == [4, 10]
    expected = {"docs/guide.md#first-steps", "figure.svg", "other.svg", "notes.md"}
    assert set(links(text)) == expected
