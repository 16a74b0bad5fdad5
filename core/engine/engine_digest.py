"""Everything that decides in a process how ops are computed, in words, to be compared with another process."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import importlib_metadata
import torch
from opgraft.binding.pluggable_class import choose_class
from opgraft.binding.specialisation import bind
from opgraft.environment import deciding_variables
from opgraft.errors import ConflictError, EngineError
from opgraft.plugins.selection import current_platform
from opgraft.registry.op_classes import qualified
from opgraft.state import host_state
from opgraft.text import printable
from opgraft.version import __version__

_OF_MODULES = ("kernel of", "class of")
"""Rows that a process has of modules that it has imported, such as ops that a script defines."""

ENGINE = "the process of the engine"

_LIBRARIES = ("transformers", "safetensors", "tokenizers")
"""Distributions that read a checkpoint, or are part of a model."""

_MOST_SHOWN = 8
"""Lines of a message about differences."""


def engine_digest() -> dict[str, str]:
    """Return versions, variables, platform, plugins, replacements, and the kernel of each op under today's settings.

    Raises:
        OpgraftError: the platform, a plugin asked for by name or a setting prevents a choice.
    """
    state = host_state()
    rows = {"opgraft": __version__, "torch": torch.__version__, "python": _python()}
    rows |= {name: _installed(name) for name in _LIBRARIES} | {"platform": current_platform().name}
    rows |= {f"variable {name}": value for name, value in deciding_variables().items()}
    for plugin in state.plugins.values():
        rows[f"plugin {plugin.name}"] = f"{plugin.provider}, {plugin.status.value}"
    rows |= {f"replacement {qualified(each.cls)}": "active" for each in state.active}
    rows |= {f"kernel of {name}": _kernel(record.cls) for name, record in state.registry.ops.items()}
    rows |= {f"class of {name}": _class(record.cls) for name, record in state.registry.classes.items()}
    return rows


def _kernel(op: type) -> str:
    try:
        binding = bind(op)
    except ConflictError:
        return "conflict"
    return f"{binding.kernel_name} of {binding.provider}"


def _class(target: type) -> str:
    try:
        choice = choose_class(target)
    except ConflictError:
        return "conflict"
    return f"{qualified(choice.cls)} of {choice.provider}"


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _installed(distribution: str) -> str:
    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return "none"


def expect_same_digest(engine: Mapping[str, str], own: Mapping[str, str], rank: int, other: str = ENGINE) -> None:
    """Refuse to compute where a rank differs from the process of the engine, or from another rank.

    Args:
        engine: digest of that process.
        own: that of the rank.
        rank: its number.
        other: what to call that process.

    Raises:
        EngineError: they differ.
    """
    known = [name for name in {**engine, **own} if not name.startswith(_OF_MODULES) or (name in engine and name in own)]
    differing = [name for name in known if engine.get(name) != own.get(name)]
    if not differing:
        return
    lines = [
        f"{name} is {engine.get(name, 'none')} for {other}, and {own.get(name, 'none')} for rank {rank}"
        for name in differing
    ]
    without = "" if other != ENGINE else ", or set parallel.executor to in_process"
    more = f"; and {len(lines) - _MOST_SHOWN} more" if len(lines) > _MOST_SHOWN else ""
    raise EngineError(
        f"rank {rank} would compute otherwise than {other}: "
        f"{printable('; '.join(lines[:_MOST_SHOWN]))}{more}. Give all the same environment and packages; let a "
        f"plugin register what a script does, by an entry point of the group opgraft.plugins{without}"
    )
