"""A process's choices for computing ops, as text, to compare the choices of two processes."""

from __future__ import annotations

from collections.abc import Mapping

from opgraft.binding.pluggable_class import choose_class
from opgraft.binding.specialisation import bind
from opgraft.errors import ConflictError, EngineError
from opgraft.plugins.agreement import differences, process_rows
from opgraft.registry.state import host_state

_OF_MODULES = ("kernel of", "class of")
"""Rows that depend on imported modules, such as ops of a script. Only common rows are compared."""

ENGINE = "the process of the engine"


def engine_digest() -> dict[str, str]:
    """Return versions, variables, platform, plugins, replacements, and the kernel of each op.

    The kernels are those under the settings of this moment.

    Raises:
        OpgraftError: the platform, a plugin asked for by name or a setting prevents a choice.
    """
    registry = host_state().registry
    rows = process_rows()
    for name, record in registry.ops.items():
        rows[f"kernel of {name}"] = _kernel(record.cls)
    for name, record in registry.classes.items():
        rows[f"class of {name}"] = _class(record.cls)
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
    """Refuse a rank with other choices than the process of the engine, or than another rank.

    Args:
        engine: the digest of the other process.
        own: the digest of the rank.
        rank: the number of the rank.
        other: the name of the other process in messages.

    Raises:
        EngineError: the digests differ.
    """
    compared = set()
    for name in {**engine, **own}:
        is_common = name in engine and name in own
        if is_common or not name.startswith(_OF_MODULES):
            compared.add(name)
    theirs = {name: text for name, text in engine.items() if name in compared}
    ours = {name: text for name, text in own.items() if name in compared}
    found = differences(theirs, ours, other, f"rank {rank}")
    if not found:
        return
    # Ranks of a launcher cannot do with one process.
    without = "" if other != ENGINE else ", or set parallel.executor to in_process"
    raise EngineError(
        f"rank {rank} would compute otherwise than {other}: {found}. Give all the same environment "
        "and packages; let a plugin register what a script does, by an entry point of the group "
        f"opgraft.plugins{without}"
    )
