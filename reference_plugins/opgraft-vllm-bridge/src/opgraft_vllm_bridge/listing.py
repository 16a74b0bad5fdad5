"""The names of vLLM that a plugin uses: which are answered here, and which are missing."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

from opgraft.errors import PluginError
from opgraft.plugins.bridges import specs_of

from opgraft_vllm_bridge.counterparts import hint
from opgraft_vllm_bridge.names import MODULES, NAMES, is_adapted
from opgraft_vllm_bridge.reading import members_of, modules_of, read_module
from opgraft_vllm_bridge.uses import Use


@dataclass(frozen=True)
class NamedUse:
    """A name of vLLM, and where a plugin uses it first."""

    name: str
    place: str

    def __str__(self) -> str:
        told = hint(self.name)
        return f"{self.name} ({self.place}{f'; {told}' if told else ''})"


@dataclass(frozen=True)
class Listing:
    """The names that a plugin uses, and the files that cannot be read, with reasons."""

    answered: tuple[NamedUse, ...]
    missing: tuple[NamedUse, ...]
    unreadable: tuple[str, ...]


def listing_of(*packages: str) -> Listing:
    """Return the names of vLLM in all files of packages. Nothing of them is imported."""
    answered: dict[str, NamedUse] = {}
    missing: dict[str, NamedUse] = {}
    unreadable = []
    for package in packages:
        for module, file in modules_of(package):
            try:
                source = read_module(module, file)
            except PluginError as error:
                unreadable.append(str(error))
                continue
            for use in source.uses:
                absent = lacking(use)
                found = answered if absent is None else missing
                name = absent or use.name
                found.setdefault(name, NamedUse(name, f"{file}:{use.line}"))
    # An attribute of a missing name is no further name.
    first = [name for name in sorted(missing) if not _above(name) & missing.keys()]
    return Listing(
        tuple(answered[name] for name in sorted(answered)),
        tuple(missing[name] for name in first),
        tuple(unreadable),
    )


def _above(name: str) -> set[str]:
    """Return the dotted names that a dotted name begins with."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def lacking(use: Use) -> str | None:
    """Return the part of a used name, from its beginning on, that there is nothing of, or ``None``."""
    parts = use.name.split(".")
    depth = max(
        count for count in range(len(parts) + 1) if ".".join(parts[:count]) in {"", *MODULES}
    )
    module, rest = ".".join(parts[:depth]), parts[depth:]
    if not rest:
        return None if module else use.name
    home = NAMES.get(module, {}).get(rest[0])
    if home is None:
        return use.name
    if not is_adapted(home):
        return None  # of opgraft's own, whose instances have more than their classes tell
    thing = rest[0]
    if thing == "current_platform":
        home, thing = NAMES[module]["Platform"], "Platform"
    classes = classes_in(home)
    for index, attribute in enumerate(rest[1:], 2):
        if thing not in classes or attribute.startswith("__"):
            return None  # a function, or of another module; or what any class has
        if attribute not in classes[thing]:
            return ".".join([module, *rest[:index]])
        thing = classes[thing][attribute]
    return None


@functools.cache
def classes_in(home: str) -> dict[str, dict[str, str]]:
    """Return the classes of a module here, and of each the members with the names of their classes, where these tell.

    They are read: importing them would import torch, for which a probe has not the time.
    """
    *_, spec = specs_of(home)
    tree = ast.parse(Path(str(spec.origin)).read_bytes())
    return {
        node.name: dict(members_of(node)) for node in tree.body if isinstance(node, ast.ClassDef)
    }
