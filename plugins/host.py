"""Loading plugins, once per process, with a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from threading import get_ident
from typing import Any, TypeVar

from opgraft.base.caches import Caches
from opgraft.base.log import logger
from opgraft.base.text import printable
from opgraft.base.version import __version__
from opgraft.config import Settings, known_fields
from opgraft.config.environment import PLUGINS, PLUGINS_DISABLE
from opgraft.errors import OpgraftError, PluginError
from opgraft.plugins.agreement import expect_lockfile_agrees, expect_process_agrees
from opgraft.plugins.loading import PluginPass
from opgraft.plugins.platform_class import prepare_platform
from opgraft.plugins.selection import current_platform, selected_platform
from opgraft.registry.decision import Candidate, Decision
from opgraft.registry.state import (
    HostState,
    PluginRecord,
    PluginStatus,
    holding_the_loading_lock,
    host_state,
)

Key = TypeVar("Key")
Value = TypeVar("Value")


def load_plugins() -> None:
    """Load and activate the plugins that apply in this process, once. Later calls return at once.

    The first op of a process calls this function. A plugin that fails is recorded, reported once
    as a warning and left out.

    Raises:
        AgreementError: the parent process has shared other decisions.
        ConfigError: a plugin on the allow list is not installed, or the lockfile cannot be used.
        PluginError: in strict mode, or for a plugin that a setting asks for by name, instead of the
            warning.
        PlatformError, ConflictError: no platform could be decided.
        UnknownTargetError: in strict mode, a replacement registered outside of plugins names a
            target that does not exist. Otherwise a warning says so, and that registration is left
            out.
    """
    state = host_state()
    if state.loading.done:
        return
    with holding_the_loading_lock(state):
        # The thread: a plugin constructs an op while it is loaded.
        if state.loading.done or state.loading.thread:
            return
        state.loading.thread = get_ident()
        try:
            expect_lockfile_agrees()
            with ExitStack() as undo_all:
                PluginPass(state, current_platform(), undo_all).run()
                config = state.settings().config
                prepare_platform(selected_platform(), config)
                expect_process_agrees()
                undo_all.pop_all()  # nothing raised: what was activated stays
            state.loading.config = config
            state.loading.done = True
            _report(state)
        finally:
            # Ops that plugins constructed meanwhile were bound to a part of the plugins.
            state.loading.thread = None
            state.invalidate()


def decide_with_plugins(
    cache: Callable[[Caches], dict[Key, Any]], key: Key, decide: Callable[[], Value]
) -> Value:
    """Load the plugins and return ``HostState.decide_once`` of the arguments.

    Both are done again if another thread calls ``reset``.

    Raises:
        OpgraftError: as ``load_plugins``, or as ``decide``.
    """
    while True:
        load_plugins()
        state = host_state()
        try:
            decision = state.decide_once(cache, key, decide)
        except OpgraftError:
            if host_state() is state:
                raise
            continue
        if host_state() is state and (state.loading.done or state.loading.thread == get_ident()):
            return decision


def _report(state: HostState) -> None:
    """Log the platform and the plugins, one line at INFO, and each plugin at DEBUG."""
    records = list(state.plugins.values())
    active = []
    failed = 0
    for record in records:
        failed += record.status is PluginStatus.FAILED
        if record.status is PluginStatus.ACTIVATED:
            active.append(printable(record.name))
    platform = printable(selected_platform().platform.name)
    installed = len(records)
    count = len(state.active)
    names = f": {', '.join(active)}" if active else ""
    # Fields beside the sentence, by which a collector of logs can filter and count.
    attributes = {
        "event.name": "opgraft.started",
        "opgraft.version": __version__,
        "opgraft.platform": platform,
        "opgraft.plugins.installed": installed,
        "opgraft.plugins.active": active,
        "opgraft.plugins.failed": failed,
        "opgraft.replacements": count,
    }
    words = "opgraft %s on platform %s: %d of %d installed plugins active%s; %d replacements"
    logger.info(
        words, __version__, platform, len(active), installed, names, count, extra=attributes
    )
    for record in records:
        words = f"plugin {record.name} of {record.provider}: {record.status.value}: {record.reason}"
        logger.debug("%s", printable(words), extra=record.attributes())


def check_loaded_with(settings: Settings, state: HostState) -> None:
    """Check that a scope asks for no other plugins: they are decided once.

    Raises:
        PluginError: one of them, ``lockfile``, ``strict`` or ``cpu_keep_memory`` differs from when
            plugins were loaded.
    """
    loaded_with = state.loading.config
    if loaded_with is None:
        return
    for name in ("plugins", "plugins_disable", "lockfile", "strict", "cpu_keep_memory"):
        wanted = getattr(settings.config, name)
        decided = getattr(loaded_with, name)
        if wanted != decided:
            variable = known_fields()[name].variable
            raise PluginError(
                f"{settings.origins[name]} sets {name} to {wanted!r}, but plugins were loaded with "
                f"{decided!r}: set {variable}, or begin the scope of the setting before the first "
                "op or engine, or call opgraft.reset() first"
            )


def plugins_decision(records: Iterable[PluginRecord], settings: Settings) -> Decision:
    """Explain which installed plugins are active in this process, and why the others are not."""
    candidates = tuple(map(_candidate, records))
    active = [candidate.name for candidate in candidates if candidate.accepted]
    ways = f"{PLUGINS}, {PLUGINS_DISABLE} or OpgraftConfig(plugins=...)" if candidates else ""
    # A scope that sets one of the fields outranks the variables.
    fixed = [settings.to_change(name, "") for name in ("plugins", "plugins_disable")]
    return Decision(
        subject="plugins",
        chosen=", ".join(active) or None,
        reason=f"{len(active)} of {len(candidates)} installed plugins active",
        candidates=candidates,
        setting="; ".join(filter(None, fixed)) or ways,
    )


def _candidate(record: PluginRecord) -> Candidate:
    status = record.status.value
    return Candidate(
        name=record.name,
        accepted=record.status is PluginStatus.ACTIVATED,
        reason=f"{status}: {record.reason}" if record.reason else status,
        provider=record.provider,
        location=record.value,
    )
