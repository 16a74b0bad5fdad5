"""The decision whether an offer is used: lists, versions, the lockfile and quarantine.

The modules of lockfiles and of quarantine are imported when an offer needs them, as start-up waits for imports.
"""

from __future__ import annotations

import importlib
from typing import Any

from opgraft.config import Settings
from opgraft.plugins.discovery import Offer
from opgraft.plugins.requirements import LOCKED_OUT, check_allow_list, unfit
from opgraft.registry.decision import Provider


def objection(offer: Offer, settings: Settings) -> str | None:
    """Say why an offer is not used, or ``None``: ``unfit``, not as the lockfile has it, or in quarantine.

    An offer that stands behind a bridge is not used without that, either.

    Raises:
        ConfigError: the lockfile cannot be used.
    """
    against = unfit(offer, settings)
    if against or offer.built_in:
        return against
    change = change_since_locked(offer, settings)
    if change:
        return f"{LOCKED_OUT}{settings.named('lockfile')}: {change}"
    bridge = offer.bridge
    bridged = objection(bridge, settings) if bridge else None
    return (
        f"{bridged} (its bridge, {bridge.provider})"
        if bridge and bridged
        else quarantined(offer.provider)
    )


def quarantined(provider: Provider) -> str | None:
    """Say why a distribution is left alone for what it did before, or ``None``.

    What reads records of that is imported where there is a distribution of others: start-up waits for imports.
    """
    reason: str | None = importlib.import_module("opgraft.plugins.quarantine").against(provider)
    return reason


def change_since_locked(offer: Offer, settings: Settings) -> str | None:
    """Say what the lockfile has against an offer, or ``None``, as where there is none and for what opgraft brings.

    Raises:
        ConfigError: the lockfile cannot be used.
    """
    if offer.built_in or settings.config.lockfile is None:
        return None
    change: str | None = _lockfile(settings).against(offer.provider)
    return change


def check_admission(settings: Settings) -> None:
    """Reject an allow list that names a plugin which is not installed, and a lockfile that cannot be used.

    Raises:
        ConfigError: for an unknown name with close matches.
    """
    check_allow_list(settings)
    if settings.config.lockfile is not None:
        _lockfile(settings)


def lockfile_in_words(path: str | None) -> str:
    """Tell lockfiles apart by what they hold, wherever they lie.

    Raises:
        ConfigError: it cannot be used.
    """
    return str(_read_lockfile(path, "the setting lockfile")) if path is not None else "none"


def _lockfile(settings: Settings) -> Any:
    return _read_lockfile(settings.config.lockfile, settings.origins["lockfile"])


def _read_lockfile(path: str | None, origin: str) -> Any:
    """Return a lockfile. What reads it is imported with the first one: start-up waits for imports."""
    return importlib.import_module("opgraft.plugins.locking").lockfile(path, origin)
