"""``share_decisions`` hands decisions down to worker processes, in an environment variable."""

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
    """Expect the decisions of this process from each process started later; return the undo.

    The decisions are the platform, the plugins with versions and installed files, the digest of the
    lockfile, the kernel of each op and each replaceable class. A worker compares these decisions
    while plugins are loaded, and while an op is bound or a replaceable class is constructed outside
    of ``set_config``. A worker with another decision stops with an error about both.

    Call the function before the first worker is started: a fork server keeps the environment of its
    start, and so does a running cluster of Ray.

    Raises:
        OpgraftError: the platform, a plugin asked for by name or a setting prevents a choice.
    """
    decision = decisions()
    # This process may be a worker itself, with the decision of its parent.
    former = os.environ.get(DECISION)
    os.environ[DECISION] = decision.to_text()

    def undo() -> None:
        if former is None:
            os.environ.pop(DECISION, None)
        else:
            os.environ[DECISION] = former

    return undo


def decisions() -> SharedDecision:
    """Return the decisions of this process: the platform, plugins, kernels and classes.

    Raises:
        OpgraftError: the platform, a plugin asked for by name or a setting prevents a choice.
    """
    load_plugins()
    return SharedDecision(host_state().identity, {**process_rows(), **_choices()})


def _choices() -> dict[str, str]:
    """Return the kernel of each op and the class of each other name, by row of the decision.

    A class with a conflict between two plugins has no row.
    """
    rows = {}
    registry = host_state().registry
    for name, record in registry.records().items():
        # A conflict is an error only if the class is constructed.
        with suppress(ConflictError):
            if name in registry.ops:
                rows[f"kernel of {name}"] = bind(record.cls).chosen
            else:
                rows[f"class of {name}"] = choose_class(record.cls).chosen
    return rows
