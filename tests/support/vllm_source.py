"""The source of a vLLM that is installed, which is only read: importing it needs its dependencies."""

from __future__ import annotations

import ast
import functools
import os
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
INSTALLED = sorted(
    (CACHE / "opgraft/envs").glob("vllm-wheel-*/lib/python3*/site-packages/vllm/__init__.py")
)
SITE = INSTALLED[-1].parents[1] if INSTALLED else Path()

needs_vllm = pytest.mark.skipif(
    not INSTALLED, reason="no vLLM is installed here; make test-vllm-bridge installs one"
)


@functools.cache
def statements(module: str) -> tuple[dict[str, ast.stmt], list[ast.ImportFrom]]:
    """What a module defines, by name, and what it imports."""
    path = SITE / module.replace(".", "/")
    file = next(
        (each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()), None
    )
    defined: dict[str, ast.stmt] = {}
    imports: list[ast.ImportFrom] = []
    waiting = list(ast.parse(file.read_text(encoding="utf-8")).body) if file else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            # The definition of an overloaded function comes after its overloads.
            if "overload" not in map(ast.unparse, node.decorator_list):
                defined[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined.update({target.id: node for target in targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.If | ast.Try):
            waiting += [*node.body, *node.orelse]
    return defined, imports


@functools.cache
def definition(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """The module and the statement that define a name, where an import leads to one."""
    defined, imports = statements(module)
    if name in defined:
        return module, defined[name]
    for node in imports:
        for alias in node.names:
            if name in (alias.asname, alias.name) or alias.name == "*":
                found = definition(
                    imported_from(module, node), name if alias.name == "*" else alias.name
                )
                if found:
                    return found
    return None


def imported_from(module: str, node: ast.ImportFrom) -> str:
    """The module that a statement imports from, where it stands in another."""
    package = (SITE / module.replace(".", "/")).is_dir()
    base = module.split(".")[: len(module.split(".")) - node.level + package] if node.level else []
    return ".".join([*base, *filter(None, [node.module])])


def constructor(module: str, cls: ast.ClassDef) -> ast.FunctionDef | None:
    """The ``__init__`` of a class or of the first base that has one."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return node
    for base in cls.bases:
        found = definition(module, base.id) if isinstance(base, ast.Name) else None
        if (
            found
            and isinstance(found[1], ast.ClassDef)
            and (init := constructor(found[0], found[1]))
        ):
            return init
    return None


def parameters(module: str, node: ast.stmt) -> list[str]:
    """The parameters of a function or of a class, but for catch-alls."""
    function = constructor(module, node) if isinstance(node, ast.ClassDef) else node
    if not isinstance(function, ast.FunctionDef):
        return []
    arguments = function.args
    return [
        each.arg
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if each.arg != "self"
    ]
