"""The modules of opgraft in a form's proof, found by imports, and the digest of their source."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

PROOF = "opgraft.testing.proof"
PACKAGES = ("opgraft.binding.functional", "opgraft.ops", "opgraft.testing")
"""The packages of definitions and proofs. Platforms and plugins do not change definitions."""


def digest_of(sources: Iterable[str]) -> str | None:
    """Digest the code of modules and of their imports; ``None`` if a source is missing.

    The code of the proof itself counts. Comments, documentation and layout do not.
    """
    digest = hashlib.sha256()
    for module in made_of((*sources, PROOF)):
        source = source_of(module)
        if source is None:
            return None
        digest.update(_code_of(source))
    return digest.hexdigest()[:16]


# Trees and digests are kept: most modules belong to many forms.
@functools.cache
def _tree_of(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def _code_of(source: str) -> bytes:
    """Return the code of a module as text for the digest."""
    return _code(_tree_of(source)).encode()


def made_of(modules: Iterable[str]) -> list[str]:
    """Return modules with all their imports of ``PACKAGES``, direct or not, sorted by name."""
    found: set[str] = set()
    left = list(modules)
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += imports_of(source_of(module) or "")
    return sorted(found)


@functools.cache
def source_of(module: str) -> str | None:
    """Return the source of a module, with the line ends of Unix."""
    try:
        found = importlib.util.find_spec(module)
        if found is None or not found.has_location or found.origin is None:
            return None
        read: Callable[[str], str | None] | None = getattr(found.loader, "get_source", None)
        # pytest's own loader rewrites assertions in pytest plugins, and has no source.
        if read is None:
            return importlib.util.decode_source(Path(found.origin).read_bytes())
        return read(module)
    except (ImportError, ValueError, OSError):  # gone, or an interactive session without a file
        return None


def _code(node: ast.AST) -> str:
    """Write a syntax tree as text, without documentation or fields of some Pythons only."""
    fields = []
    for name, value in ast.iter_fields(node):
        # Newer Pythons have further fields, which are empty for code that older ones read.
        if value not in (None, []) and name != "ctx":
            fields.append(f"{name}={_value(value)}")
    return f"{type(node).__name__}({', '.join(fields)})"


def _value(value: Any) -> str:
    if isinstance(value, list):
        kept = [_value(item) for item in value if not _is_documentation(item)]
        return f"[{', '.join(kept)}]"
    return _code(value) if isinstance(value, ast.AST) else repr(value)


def _is_documentation(node: object) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


@functools.cache
def imports_of(source: str) -> tuple[str, ...]:
    """Return the direct imports of ``PACKAGES`` in a source."""
    tree = _tree_of(source)
    imported = _imported(tree)
    names = list(imported.values())
    facades = {local: name for local, name in imported.items() if _is_facade(name)}
    # Most modules import no facade, and need no walk over all expressions.
    for node in ast.walk(tree) if facades else ():
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        facade = facades.get(node.value.id)
        if facade is not None:
            names.append(f"{facade}.{node.attr}")
    modules = {_module_of(name) for name in names}
    return tuple(sorted(module for module in modules if module))


def _imported(tree: ast.Module) -> dict[str, str]:
    """Map local names to imported dotted names; ``import *`` brings the module's ``__all__``."""
    found: dict[str, str] = {}
    for node in _statements(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.names[0].name == "*":
            exported = _exported(source_of(node.module or "") or "")
            found |= {name: f"{node.module}.{name}" for name in exported}
            continue
        for alias in node.names:
            found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _exported(source: str) -> list[str]:
    """Return the names in the ``__all__`` of a module."""
    for node in _tree_of(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all statements of a module, also nested ones, without their expressions."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.stmt | ast.excepthandler | ast.match_case):
                left.append(each)


def _module_of(name: str) -> str | None:
    """Return the module of ``PACKAGES`` for a dotted name of a module or of an object within."""
    owner, _, attribute = name.rpartition(".")
    if _is_facade(owner):
        name = _passed_on(source_of(owner) or "").get(attribute, name)
        owner = name.rpartition(".")[0]
    if _is_facade(name) or not f"{name}.".startswith(tuple(f"{package}." for package in PACKAGES)):
        return None
    return name if source_of(name) is not None else owner


@functools.cache
def _is_facade(module: str) -> bool:
    """Return True if a module only passes on names: then the modules with these names count."""
    return module.startswith("opgraft.ops") and _is_package(module)


def _is_package(module: str) -> bool:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return found is not None and found.submodule_search_locations is not None


@functools.cache
def _passed_on(source: str) -> dict[str, str]:
    return _imported(_tree_of(source))
