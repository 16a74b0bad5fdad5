"""The agreement of processes: a worker must decide as its parent process."""

from __future__ import annotations

import csv
import os
import platform as python
from collections.abc import Iterable, Mapping

from opgraft.base.installed import version_of
from opgraft.base.text import printable
from opgraft.base.version import __version__
from opgraft.config.environment import DECISION, deciding_variables
from opgraft.errors import AgreementError
from opgraft.plugins.admission import lockfile_in_words
from opgraft.plugins.discovery import discover, is_editable
from opgraft.plugins.metadata import text_of
from opgraft.plugins.records import digest_of_wheel, rows_of
from opgraft.plugins.selection import selected_platform
from opgraft.registry.decision import Provider
from opgraft.registry.op_classes import qualified
from opgraft.registry.state import HostState, PluginStatus, host_state

_LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers")
"""Distributions that compute, read a checkpoint, or are part of a model."""

_MOST_SHOWN = 8
"""Lines of a message about differences."""

_CHOICES = ("kernel of ", "class of ")
"""Beginnings of rows that are compared when a choice is made, not when plugins are loaded."""

_LOCKFILE = "lockfile"
"""The row of the lockfile. A scope or a command may have set the lockfile, beside any variable."""


def process_rows() -> dict[str, str]:
    """Return versions, variables, lockfile, platform, plugins and replacements of this process.

    The files of distributions have rows too, as the same version may be built of other files. So
    has the order of plugins: the first adapter that takes a module grafts the module, and the
    defaults of the last plugin hold.

    Raises:
        OpgraftError: the platform cannot be decided.
    """
    state, selection = host_state(), selected_platform()
    # Patch releases of Python load the same bytecode and extensions.
    major_and_minor = python.python_version_tuple()[:2]
    rows = {"opgraft": __version__, "python": ".".join(major_and_minor)}
    for name in _LIBRARIES:
        rows[name] = version_of(name) or "none"
    rows["platform"] = selection.platform.name
    for name, value in deciding_variables().items():
        rows[f"variable {name}"] = value
    rows[_LOCKFILE] = lockfile_in_words(state.settings().config.lockfile)
    chosen = [each.provider for each in selection.decision.candidates if each.accepted]
    return rows | _rows_of_plugins(state, chosen)


def _rows_of_plugins(state: HostState, chosen: Iterable[Provider | None]) -> dict[str, str]:
    """Return the rows of plugins, distributions and replacements.

    Args:
        state: of this process.
        chosen: the providers of the platform.
    """
    rows = {}
    plugins = state.plugins.values()
    for plugin in plugins:
        rows[f"plugin {plugin.name}"] = f"{plugin.provider}, {plugin.status.value}"
    active = [plugin for plugin in plugins if plugin.status is PluginStatus.ACTIVATED]
    rows["order of plugins"] = ", ".join(plugin.name for plugin in active) or "none"
    used = [*filter(None, chosen), *(plugin.provider for plugin in active)]
    # A distribution may bring a platform and several plugins.
    for provider in dict.fromkeys(used):
        rows[f"distribution {provider.name}"] = _installation(provider)
    for replacement in state.active:
        rows[f"replacement {qualified(replacement.cls)}"] = "active"
    return rows


def _installation(provider: Provider) -> str:
    """Return words for the version and the installed files of a distribution."""
    distribution = discover().distributions.get(provider)
    if distribution is None:  # opgraft itself
        return str(provider.version)
    try:
        rows = rows_of(text_of(distribution, "RECORD") or "")
    except (ValueError, OSError, csv.Error):
        rows = []
    # Two machines with one wheel agree, whichever installers they have.
    digest = digest_of_wheel(rows)
    editable = " (editable)" if is_editable(distribution) else ""
    return f"{provider.version}{editable}, files with the SHA-256 {digest:.12}"


def differences(theirs: Mapping[str, str], own: Mapping[str, str], other: str, this: str) -> str:
    """Return one line about the differences of two processes; empty if there are none."""
    lines = []
    for name in {**theirs, **own}:
        first, second = theirs.get(name, "none"), own.get(name, "none")
        if theirs.get(name) != own.get(name):
            lines.append(f"{name} is {first} for {other}, and {second} for {this}")
    shown = printable("; ".join(lines[:_MOST_SHOWN]))
    rest = len(lines) - _MOST_SHOWN
    return f"{shown}; and {rest} more" if rest > 0 else shown


def expect_lockfile_agrees() -> None:
    """Check the lockfile of this process before anything is probed and imported.

    Raises:
        AgreementError: the process that shared its decisions has a lockfile of other content, or
            none.
        ConfigError: the lockfile of this process cannot be used.
    """
    theirs = (_shared() or {}).get(_LOCKFILE)
    if theirs is None:
        return
    own = lockfile_in_words(host_state().settings().config.lockfile)
    _expect({_LOCKFILE: theirs}, {_LOCKFILE: own})


def expect_process_agrees() -> None:
    """Check plugins, versions and platform of this process.

    Raises:
        AgreementError: the parent process has others.
    """
    shared = _shared()
    if shared is None:
        return
    # Choices of kernels are compared one by one, when they are made.
    theirs = {name: value for name, value in shared.items() if not name.startswith(_CHOICES)}
    _expect(theirs, process_rows())


def expect_choice_agrees(subject: str, choice: str) -> None:
    """Check the choice of a kernel or class.

    Args:
        subject: such as ``kernel of rms_norm``.
        choice: the choice of this process.

    Raises:
        AgreementError: the parent process has the op, and has chosen otherwise.
    """
    theirs = (_shared() or {}).get(subject, choice)
    _expect({subject: theirs}, {subject: choice})


def _shared() -> Mapping[str, str] | None:
    """Return the decisions of the parent process, if shared."""
    decision = host_state().known_environment().decision
    return None if decision is None else decision.rows_for(host_state().identity)


def _expect(theirs: Mapping[str, str], own: Mapping[str, str]) -> None:
    found = differences(theirs, own, "the process that started it", "this one")
    if found:
        raise AgreementError(
            f"process {os.getpid()} would compute otherwise than the process that started it: "
            f"{found}. Give both the same environment, packages and settings, or unset {DECISION}"
        )
