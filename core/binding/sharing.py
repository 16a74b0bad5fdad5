"""Handing decisions down to worker processes, however they are started."""

from __future__ import annotations

import os
from collections.abc import Callable

from opgraft.binding.specialisation import bind
from opgraft.environment import DECISION, SharedDecision
from opgraft.errors import ConflictError
from opgraft.plugins.agreement import process_rows
from opgraft.plugins.host import load_plugins
from opgraft.state import host_state


def share_decisions() -> Callable[[], None]:
    """Have processes that this one starts decide as it does now, or stop with both decisions; returns the undo.

    Platform, plugins, versions, the lockfile's digest and the kernel of each op stand in an environment variable. A
    worker compares them when it loads its plugins and when it binds an op outside of ``set_config``. Call it before the
    first worker is started: a fork server keeps the environment that it began with.

    Raises:
        OpgraftError: the platform, a plugin asked for by name or a setting prevents a choice.
    """
    load_plugins()
    rows = {**process_rows(), **_kernels()}
    former = os.environ.get(DECISION)
    os.environ[DECISION] = SharedDecision(host_state().identity, rows).to_text()

    def undo() -> None:
        if former is None:
            os.environ.pop(DECISION, None)
        else:
            os.environ[DECISION] = former

    return undo


def _kernels() -> dict[str, str]:
    """Return the kernel of each op, by its row; of one that two plugins claim there is none."""
    rows = {}
    for name, record in host_state().registry.ops.items():
        try:
            rows[f"kernel of {name}"] = bind(record.cls).chosen
        except ConflictError:
            continue
    return rows
