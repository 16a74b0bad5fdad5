"""Handing decisions down to worker processes, however they are started."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from opgraft.binding.pluggable_class import choose_class
from opgraft.binding.specialisation import bind
from opgraft.config.environment import DECISION, SharedDecision
from opgraft.errors import ConflictError
from opgraft.plugins.agreement import process_rows
from opgraft.plugins.host import load_plugins
from opgraft.registry.state import host_state


def share_decisions() -> Callable[[], None]:
    """Have processes that this one starts decide as it does now, or stop with both decisions; returns the undo.

    Platform, plugins, versions and installed files of these, the lockfile's digest, the kernel of each op and each
    replaceable class stand in an environment variable. A worker compares them when it loads its plugins, and when it
    binds an op or constructs such a class outside of ``set_config``. Call it before the first worker is started: a fork
    server keeps the environment that it began with, and so does a cluster of Ray that runs already.

    Raises:
        OpgraftError: the platform, a plugin asked for by name or a setting prevents a choice.
    """
    load_plugins()
    rows = {**process_rows(), **_choices()}
    former = os.environ.get(DECISION)
    os.environ[DECISION] = SharedDecision(host_state().identity, rows).to_text()

    def undo() -> None:
        if former is None:
            os.environ.pop(DECISION, None)
        else:
            os.environ[DECISION] = former

    return undo


def _choices() -> dict[str, str]:
    """Return the kernel of each op, and each other class, by its row; of what two plugins claim there is none."""
    rows, registry = {}, host_state().registry
    for name, record in registry.records().items():
        with suppress(ConflictError):
            if name in registry.ops:
                rows[f"kernel of {name}"] = bind(record.cls).chosen
            else:
                rows[f"class of {name}"] = choose_class(record.cls).chosen
    return rows
