"""Judging before any of a plugin is imported whether all that it uses of vLLM has a counterpart."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from opgraft.errors import PluginError
from opgraft.hosts import specs_of

from opgraft_vllm_bridge.counterparts import hint
from opgraft_vllm_bridge.names import MODULES, NAMES, is_adapted
from opgraft_vllm_bridge.reading import Source, members_of, sources_of
from opgraft_vllm_bridge.uses import Use


@dataclass(frozen=True)
class Missing:
    """A name of vLLM without a counterpart, and where a plugin uses it first."""

    name: str
    place: str

    def __str__(self) -> str:
        told = hint(self.name)
        return f"{self.name} ({self.place}{f'; {told}' if told else ''})"


@dataclass(frozen=True)
class Judgement:
    """Names that a plugin lacks, and methods of its platform that nobody calls here, by name the place."""

    missing: tuple[Missing, ...]
    uncalled: dict[str, str]


def judge(*modules: str, apart: Collection[str] = ()) -> Judgement:
    """Read a plugin, from these modules on, but for functions of the first that are ``apart``.

    Raises:
        PluginError: it cannot be read.
    """
    sources = sources_of(*modules, apart=apart)
    called = _called(sources)
    methods = {
        name: f"{source.file}:{line}" for source in sources for name, line in source.methods.items()
    }
    own = {name for source in sources for name in source.members}
    found: dict[str, Missing] = {}
    for source in sources:
        optional = tuple(f"{name}." for name in source.optional if lacking(Use(name, 0)))
        bodies = [use for name, uses in source.bodies.items() if name in called for use in uses]
        for use in sorted([*source.uses, *bodies], key=lambda use: use.line):
            name = lacking(use)
            if name and name.rpartition(".")[2] not in own and not f"{name}.".startswith(optional):
                found.setdefault(name, Missing(name, f"{source.file}:{use.line}"))
    uncalled = {name: place for name, place in methods.items() if name not in called}
    first = [
        name for name in sorted(found) if not any(name.startswith(f"{other}.") for other in found)
    ]
    return Judgement(tuple(found[name] for name in first), uncalled)


def expect_counterparts(plugin: str, judgement: Judgement) -> None:
    """Refuse a plugin that uses what has no counterpart.

    Raises:
        PluginError: it lists all of that.
    """
    missing = judgement.missing
    if missing:
        names = f"{len(missing)} names of vLLM that opgraft has no counterpart of"
        raise PluginError(
            f"the vLLM plugin {plugin!r} needs {names}: {'; '.join(map(str, missing))}. 'opgraft new --from-vllm' "
            "writes a copy in which these are marked",
            missing[0].place,
        )


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


def _called(sources: Iterable[Source]) -> set[str]:
    """Return the names of methods of a platform that opgraft calls, or the plugin itself."""
    base = classes_in(NAMES["vllm.platforms.interface"]["Platform"])["Platform"]
    return {*base, *(name for source in sources for name in source.attributes)}
