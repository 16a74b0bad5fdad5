"""The agreement of processes: what a worker decides must be what the process that started it has decided."""

from __future__ import annotations

import hashlib
import os
import platform as python
from collections.abc import Mapping

from opgraft.base.installed import version_of
from opgraft.base.text import printable
from opgraft.config.environment import DECISION, deciding_variables
from opgraft.errors import AgreementError
from opgraft.plugins.admission import lockfile_in_words
from opgraft.plugins.discovery import discover, is_editable
from opgraft.plugins.metadata import text_of
from opgraft.plugins.selection import selected_platform
from opgraft.registry.decision import Provider
from opgraft.registry.op_classes import qualified
from opgraft.registry.state import PluginStatus, host_state
from opgraft.version import __version__

_LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers")
"""Distributions that compute, read a checkpoint, or are part of a model."""

_MOST_SHOWN = 8
"""Lines of a message about differences."""

_CHOICES = ("kernel of ", "class of ")
"""Beginnings of rows that are compared when a choice is made, not when plugins are loaded."""

_LOCKFILE = "lockfile"
"""The row of the lockfile, by what it holds: a scope or a command may have set it, where no variable tells of it."""


def process_rows() -> dict[str, str]:
    """Return versions, variables, lockfile, platform, plugins and replacements of this process, by what they are.

    Of the distributions that it uses, too, as the same version may be built of other files. Of plugins their order, as
    the first adapter that takes a module grafts it, and defaults of the last one hold.

    Raises:
        OpgraftError: the platform cannot be decided.
    """
    state, selection = host_state(), selected_platform()
    rows = {"opgraft": __version__, "python": ".".join(python.python_version_tuple()[:2])}
    rows |= {name: version_of(name) or "none" for name in _LIBRARIES} | {
        "platform": selection.platform.name
    }
    rows |= {f"variable {name}": value for name, value in deciding_variables().items()}
    rows[_LOCKFILE] = lockfile_in_words(state.settings().config.lockfile)
    for plugin in state.plugins.values():
        rows[f"plugin {plugin.name}"] = f"{plugin.provider}, {plugin.status.value}"
    active = [
        plugin for plugin in state.plugins.values() if plugin.status is PluginStatus.ACTIVATED
    ]
    rows["order of plugins"] = ", ".join(plugin.name for plugin in active) or "none"
    chosen = [each.provider for each in selection.decision.candidates if each.accepted]
    used = dict.fromkeys([*filter(None, chosen), *(plugin.provider for plugin in active)])
    rows |= {f"distribution {each.name}": _installation(each) for each in used}
    return rows | {f"replacement {qualified(each.cls)}": "active" for each in state.active}


def _installation(provider: Provider) -> str:
    """Tell a distribution from others of its name, by version and installed files, wherever these lie."""
    distribution = discover().distributions.get(provider)
    if distribution is None:  # opgraft itself
        return str(provider.version)
    try:
        record = text_of(distribution, "RECORD") or ""
    except (ValueError, OSError):
        record = ""
    # Less scripts and what the installer says of itself, which differ between machines with the same wheels.
    lines = (
        line for line in record.splitlines() if ",sha" in line and not line.startswith(("..", "/"))
    )
    files = "\n".join(sorted(line for line in lines if ".dist-info/" not in line))
    editable = " (editable)" if is_editable(distribution) else ""
    return f"{provider.version}{editable}, files with the SHA-256 {hashlib.sha256(files.encode()).hexdigest():.12}"


def differences(theirs: Mapping[str, str], own: Mapping[str, str], other: str, this: str) -> str:
    """Say in one line how two processes differ; empty where they do not."""
    names = [name for name in {**theirs, **own} if theirs.get(name) != own.get(name)]
    lines = [
        f"{name} is {theirs.get(name, 'none')} for {other}, and {own.get(name, 'none')} for {this}"
        for name in names
    ]
    more = f"; and {len(lines) - _MOST_SHOWN} more" if len(lines) > _MOST_SHOWN else ""
    return printable("; ".join(lines[:_MOST_SHOWN])) + more


def expect_lockfile_agrees() -> None:
    """Refuse to probe and import what another lockfile admits than that of the process that shared its decisions.

    Raises:
        AgreementError: what they hold differs, or one of the two processes has none.
        ConfigError: that of this process cannot be used.
    """
    theirs = (_shared() or {}).get(_LOCKFILE)
    if theirs is not None:
        _expect(
            {_LOCKFILE: theirs},
            {_LOCKFILE: lockfile_in_words(host_state().settings().config.lockfile)},
        )


def expect_process_agrees() -> None:
    """Refuse to go on with other plugins, versions or another platform than the process that shared its decisions.

    Raises:
        AgreementError: they differ.
    """
    shared = _shared()
    if shared is not None:
        _expect(
            {name: value for name, value in shared.items() if not name.startswith(_CHOICES)},
            process_rows(),
        )


def expect_choice_agrees(subject: str, choice: str) -> None:
    """Refuse a kernel or class that the process that shared its decisions has chosen otherwise, where it has the op.

    Args:
        subject: such as ``kernel of rms_norm``.
        choice: what this process has chosen.

    Raises:
        AgreementError: that process has chosen another.
    """
    theirs = (_shared() or {}).get(subject, choice)
    _expect({subject: theirs}, {subject: choice})


def _shared() -> Mapping[str, str] | None:
    """Return what another process has shared with this one, if it did."""
    environment = host_state().known_environment()
    return (
        None
        if environment.decision is None
        else environment.decision.rows_for(host_state().identity)
    )


def _expect(theirs: Mapping[str, str], own: Mapping[str, str]) -> None:
    found = differences(theirs, own, "the process that started it", "this one")
    if found:
        raise AgreementError(
            f"process {os.getpid()} would compute otherwise than the process that started it: {found}. Give both the "
            f"same environment, packages and settings, or unset {DECISION}"
        )
