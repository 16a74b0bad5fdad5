"""Plugins, the template and the documentation import the public modules of opgraft, and nothing else of it."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

import pytest
from docs.test_reference import names
from opgraft.plugins.discovery import PLATFORM_GROUP, PLUGIN_GROUP
from support.source_trees import MODULES, REPOSITORY, texts

pytestmark = pytest.mark.source

PUBLIC = frozenset(names("api", "module"))
"""The modules that the page of the Python API lists."""

_BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.S | re.M)
_JINJA_VALUE = re.compile(r"\{\{.*?\}\}")
_JINJA_CODE = re.compile(r"\{%.*?%\}")


def sources() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of all code that stands for code of others."""
    plugins = REPOSITORY / "reference_plugins"
    for path in sorted([*plugins.rglob("*.py"), *(REPOSITORY / "examples").rglob("*.py")]):
        yield str(path.relative_to(REPOSITORY)), path.read_text(encoding="utf-8")
    for path in sorted((REPOSITORY / "core/template").rglob("*.py.jinja")):
        text = path.read_text(encoding="utf-8")
        yield str(path.relative_to(REPOSITORY)), _JINJA_CODE.sub("", _JINJA_VALUE.sub("x", text))
    pages = [REPOSITORY / "README.md", *plugins.glob("*/README.md")]
    for path in sorted([*pages, *(REPOSITORY / "docs").rglob("*.md")]):
        for block in _BLOCK.findall(path.read_text(encoding="utf-8")):
            yield str(path.relative_to(REPOSITORY)), block


def imports_of(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Yield each module of opgraft that code imports, with the name that it takes from there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported = [(str(node.module), alias.name) for alias in node.names]
        else:
            continue
        yield from (pair for pair in imported if pair[0].partition(".")[0] == "opgraft")


def objection(module: str, name: str | None) -> str | None:
    """Say why an import is none of a public name, or return None."""
    if module not in PUBLIC:
        return f"{module} is no public module"
    submodule = f"{module}.{name}"
    if name is None or submodule in PUBLIC:
        return None
    if submodule in MODULES:
        return f"{submodule} is no public module"
    public = getattr(importlib.import_module(module), "__all__", None)
    if name.startswith("_") and name != "__version__":
        return f"{submodule} is private"
    return f"{module}.__all__ lacks {name}" if public is not None and name not in public else None


def test_the_listed_modules_exist() -> None:
    """Each public module is a module of the source, and can be imported."""
    assert sorted(PUBLIC - MODULES.keys()) == []
    for module in PUBLIC:
        importlib.import_module(module)


def test_others_import_public_modules_only() -> None:
    """Reference plugins, examples, the template and pages import public names of public modules."""
    found = []
    for place, text in sources():
        for module, name in imports_of(ast.parse(text)):
            reason = objection(module, name)
            if reason:
                found.append(f"{place}: {reason}")
    assert found == []


def test_plugins_name_public_modules_only() -> None:
    """A module that a reference plugin names in a text, alone or as ``module:name``, is public as well."""
    plugins = sorted((REPOSITORY / "reference_plugins").glob("*/src/**/*.py"))
    named = {
        module
        for path in plugins
        for _, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if (module := text.partition(":")[0]) in MODULES
    }
    groups = {PLATFORM_GROUP, PLUGIN_GROUP}  # of entry points, which folders have the names of
    assert sorted(named - PUBLIC - groups) == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import opgraft.registry.state", "opgraft.registry.state is no public module"),
        ("from opgraft import binding", "opgraft.binding is no public module"),
        ("def f():\n    from opgraft.ops.weights import put", "opgraft.ops.weights is no public"),
        ("from opgraft import _HOME", "opgraft._HOME is private"),
        ("from opgraft.kernels import torch", "opgraft.kernels.__all__ lacks torch"),
        ("from opgraft import kernels, RMSNorm", "opgraft.__all__ lacks RMSNorm"),
    ],
)
def test_imports_that_are_found(code: str, reason: str) -> None:
    """Internal modules, private names and names that a module does not export are found wherever they stand."""
    (told,) = (why for each in imports_of(ast.parse(code)) if (why := objection(*each)))
    assert told.startswith(reason)
