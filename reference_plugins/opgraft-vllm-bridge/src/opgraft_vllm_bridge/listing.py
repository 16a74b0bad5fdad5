"""The names of vLLM in a plugin's source, divided into answered and missing names."""

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
        next_step = hint(self.name)
        if not next_step:
            return f"{self.name} ({self.place})"
        return f"{self.name} ({self.place}; {next_step})"


@dataclass(frozen=True)
class Listing:
    """The names of vLLM in a plugin, and the messages about files that cannot be read."""

    answered: tuple[NamedUse, ...]
    missing: tuple[NamedUse, ...]
    unreadable: tuple[str, ...]


def listing_of(*packages: str) -> Listing:
    """Return the names of vLLM in all files of packages. None of the packages is imported."""
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
    """Return the missing part of a used name, or None if the name is answered.

    For ``vllm.platforms.Platform.get_nothing.then`` this is
    ``vllm.platforms.Platform.get_nothing``.
    """
    module, rest = _divided(use.name)
    if not rest:
        return None if module else use.name
    thing, *attributes = rest
    home = NAMES.get(module, {}).get(thing)
    if home is None:
        return use.name
    # Instances of opgraft's own classes have more attributes than their classes declare.
    if not is_adapted(home):
        return None
    if thing == "current_platform":
        home = NAMES[module]["Platform"]
        thing = "Platform"
    classes = classes_in(home)
    for index, attribute in enumerate(attributes, 2):
        # Only classes of this module are known, and every class has names with underscores.
        if thing not in classes or attribute.startswith("__"):
            return None
        if attribute not in classes[thing]:
            return ".".join([module, *rest[:index]])
        thing = classes[thing][attribute]
    return None


def _divided(name: str) -> tuple[str, list[str]]:
    """Return the longest known module that a dotted name begins with, and the other parts."""
    parts = name.split(".")
    depth = len(parts)
    while depth and ".".join(parts[:depth]) not in MODULES:
        depth -= 1
    return ".".join(parts[:depth]), parts[depth:]


@functools.cache
def classes_in(home: str) -> dict[str, dict[str, str]]:
    """Return class → member → annotation, for the classes of a module of this package.

    The source is read. An import would import torch, and a probe has no time for that.
    """
    *_, spec = specs_of(home)
    tree = ast.parse(Path(str(spec.origin)).read_bytes())
    return {
        node.name: dict(members_of(node)) for node in tree.body if isinstance(node, ast.ClassDef)
    }
