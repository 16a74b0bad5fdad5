"""The source of this code base as syntax trees, which tests read."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDERS = {"core": "opgraft", "platforms": "opgraft.platforms", "plugins": "opgraft.plugins"}

MODULES = {
    ".".join([package, *path.relative_to(REPOSITORY / folder).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): path
    for folder, package in FOLDERS.items()
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
}
SHIPPED = [*MODULES.values(), *sorted((REPOSITORY / "reference_plugins").glob("*/src/**/*.py"))]
OURS = [
    path
    for folder in ("benchmarks", "examples", "tests", "tools")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for name in ("id", "attr", "arg", "name"):
            value = getattr(node, name, None)
            if isinstance(value, str):
                yield getattr(node, "lineno", 0), value


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and value of each string that is not documentation."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
        ):
            yield node.lineno, node.value


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those below assignments included."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def dotted(node: ast.AST) -> str:
    """'a.b.c' for an attribute chain on a name, else ''."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
