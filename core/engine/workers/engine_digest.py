"""Everything that decides in a process how ops are computed, in words, to be compared with another process."""

from __future__ import annotations

from collections.abc import Mapping

from opgraft.binding.pluggable_class import choose_class
from opgraft.binding.specialisation import bind
from opgraft.errors import ConflictError, EngineError
from opgraft.plugins.agreement import differences, process_rows
from opgraft.registry.state import host_state

_OF_MODULES = ("kernel of", "class of")
"""Rows that a process has of modules that it has imported, such as ops that a script defines."""

ENGINE = "the process of the engine"


def engine_digest() -> dict[str, str]:
    """Return versions, variables, platform, plugins, replacements, and the kernel of each op under today's settings.

    Raises:
        OpgraftError: the platform, a plugin asked for by name or a setting prevents a choice.
    """
    state, rows = host_state(), process_rows()
    rows |= {
        f"kernel of {name}": _kernel(record.cls) for name, record in state.registry.ops.items()
    }
    rows |= {
        f"class of {name}": _class(record.cls) for name, record in state.registry.classes.items()
    }
    return rows


def _kernel(op: type) -> str:
    try:
        binding = bind(op)
    except ConflictError:
        return "conflict"
    return binding.chosen


def _class(target: type) -> str:
    try:
        return choose_class(target).chosen
    except ConflictError:
        return "conflict"


def expect_same_digest(
    engine: Mapping[str, str], own: Mapping[str, str], rank: int, other: str = ENGINE
) -> None:
    """Refuse to compute where a rank differs from the process of the engine, or from another rank.

    Args:
        engine: digest of that process.
        own: that of the rank.
        rank: its number.
        other: what to call that process.

    Raises:
        EngineError: they differ.
    """
    known = [
        name
        for name in {**engine, **own}
        if not name.startswith(_OF_MODULES) or (name in engine and name in own)
    ]
    theirs, ours = ({name: rows[name] for name in known if name in rows} for rows in (engine, own))
    found = differences(theirs, ours, other, f"rank {rank}")
    if not found:
        return
    without = "" if other != ENGINE else ", or set parallel.executor to in_process"
    raise EngineError(
        f"rank {rank} would compute otherwise than {other}: "
        f"{found}. Give all the same environment and packages; let a "
        f"plugin register what a script does, by an entry point of the group opgraft.plugins{without}"
    )
