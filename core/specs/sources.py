"""Which modules of opgraft a form's proof is made of, as their imports tell, and the digest of their source."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable

PROOF = "opgraft.specs.proof"
PACKAGES = ("opgraft.definitions", "opgraft.ops", "opgraft.specs")
"""Where definitions, modules and what proves them live; platforms and plugins do not change what these compute."""
FACADES = ("opgraft.functional", "opgraft.ops")
"""Modules that only pass on what others define: of these, the modules with the names that are used count."""


def digest_of(sources: Iterable[str]) -> str | None:
    """A short digest of the source of modules and of all that they are made of; ``None`` without the source of one.

    It is the same whatever ends their lines. What proves forms is part of it.
    """
    digest = hashlib.sha256()
    for module in made_of((*sources, PROOF)):
        source = source_of(module)
        if source is None:
            return None
        digest.update(source.encode())
    return digest.hexdigest()[:16]


def made_of(modules: Iterable[str]) -> list[str]:
    """``modules`` and those that they import, directly or not, of ``PACKAGES``; in the order of their names."""
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
    """The source of a module, with the line ends of Unix."""
    try:
        found = importlib.util.find_spec(module)
        source: str | None = getattr(found.loader, "get_source", lambda _: None)(module) if found else None
    except (ImportError, ValueError):  # gone, or a session, which has no file
        return None
    return source


@functools.cache
def imports_of(source: str) -> tuple[str, ...]:
    """The modules of ``PACKAGES`` that a module with that source imports itself."""
    tree = ast.parse(source)
    imported = _imported(tree)
    facades = {local: name for local, name in imported.items() if name in FACADES}
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = [f"{facades[x.value.id]}.{x.attr}" for x in used if isinstance(x.value, ast.Name) and x.value.id in facades]
    modules = (_module_of(name) for name in (*names, *imported.values()))
    return tuple(sorted({module for module in modules if module}))


def _imported(tree: ast.Module) -> dict[str, str]:
    """By local name, the dotted name that is imported."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def _module_of(name: str) -> str | None:
    """The module of ``PACKAGES`` that a dotted name stands for, or is defined in."""
    owner, _, attribute = name.rpartition(".")
    if owner in FACADES:
        name = _passed_on(source_of(owner) or "").get(attribute, name)
        owner = name.rpartition(".")[0]
    if name in FACADES or not name.startswith(tuple(f"{package}." for package in PACKAGES)):
        return None
    return name if source_of(name) is not None else owner


@functools.cache
def _passed_on(source: str) -> dict[str, str]:
    return _imported(ast.parse(source))
