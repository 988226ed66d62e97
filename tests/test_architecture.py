"""Holds the tree against ARCHITECTURE.md and the rules that keep it readable."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("tectonic_client", "fusefs", "nfs_tier", "bench")

MAX_PAGE_LINES = 150
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 70


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the packages by its path from the root."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def listed() -> list[str]:
    """Modules that ARCHITECTURE.md describes: `path/module.py`, related ones may share a line."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    return re.findall(r"`([\w/]+\.py)`", page)


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a module, inner ones too."""
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def imported(tree: ast.Module) -> set[str]:
    """Top-level packages that loading the module imports."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def test_the_architecture_page_lists_every_module_once() -> None:
    """ARCHITECTURE.md has exactly one line for each module of the tree, and for nothing else."""
    # A package's own file holds a docstring; the lines of its modules say what it is for.
    expected = {path for path in modules() if not path.endswith("__init__.py")}
    found = Counter(path for path in listed() if not path.startswith("tests/"))
    assert {path for path, count in found.items() if count > 1} == set(), "listed twice"
    assert expected - found.keys() == set(), "without a line in ARCHITECTURE.md"
    assert found.keys() - expected == set(), "listed, but not there"


def test_the_architecture_page_is_one_page() -> None:
    """ARCHITECTURE.md stays short enough to be read in one go."""
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= MAX_PAGE_LINES


def test_no_module_is_named_for_what_it_is_not() -> None:
    """No module or package is called utils, common or helpers: such rooms collect everything."""
    parts = {(path, part) for path in modules() for part in Path(path).with_suffix("").parts}
    assert [path for path, part in parts if re.search("util|common|helper", part)] == []


def test_pyfuse3_is_known_to_two_modules() -> None:
    """The FUSE library can be replaced by changing two modules (bench has one to compare with)."""
    users = [
        path for path, tree in modules().items()
        if "pyfuse3" in imported(tree) and not path.startswith("bench/")
    ]  # fmt: skip
    assert len(users) <= 2, users


def test_files_and_functions_are_short() -> None:
    """No file has more than 800 lines and no function more than 70."""
    long_files = {path: _lines(path) for path in modules() if _lines(path) > MAX_FILE_LINES}
    long_functions = {
        f"{path}:{node.lineno} {node.name}": _length(node)
        for path, tree in modules().items()
        for node in functions(tree)
        if _length(node) > MAX_FUNCTION_LINES
    }
    assert (long_files, long_functions) == ({}, {})


def _lines(path: str) -> int:
    return len((ROOT / path).read_text().splitlines())


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_every_module_says_what_it_is() -> None:
    """Each module begins with a docstring."""
    assert [path for path, tree in modules().items() if ast.get_docstring(tree) is None] == []


def test_every_test_says_what_it_proves() -> None:
    """Each test function's docstring begins with a line of text."""
    silent = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in functions(ast.parse(path.read_text()))
        if node.name.startswith("test_") and not (ast.get_docstring(node) or "").strip()
    ]
    assert silent == []


def test_the_changelog_is_newest_first() -> None:
    """CHANGELOG.md has one section per release, the unreleased one on top."""
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert titles[0] == "Unreleased"
    releases = [tuple(map(int, title.split()[0].split("."))) for title in titles[1:]]
    assert all(newer > older for newer, older in pairwise(releases))
