"""The decision whether an offer is used: lists, versions, the lockfile and quarantine.

The modules of lockfiles and of quarantine are imported when an offer needs them, as start-up waits
for imports.
"""

from __future__ import annotations

import importlib
from typing import Any

from opgraft.config import Settings
from opgraft.plugins.discovery import Offer
from opgraft.plugins.requirements import LOCKED_OUT, check_allow_list, unfit
from opgraft.registry.decision import Provider


def objection(offer: Offer, settings: Settings) -> str | None:
    """Return the reason why an offer is not used, or ``None`` if the offer is used.

    The offer is ``unfit``, differs from the lockfile, or is in quarantine. An offer behind a bridge
    needs the bridge.

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
    if bridge is not None:
        bridged = objection(bridge, settings)
        if bridged:
            return f"{bridged} (its bridge, {bridge.provider})"
    return quarantined(offer.provider)


def quarantined(provider: Provider) -> str | None:
    """Return the reason why a distribution is in quarantine, or ``None``."""
    quarantine = importlib.import_module("opgraft.plugins.quarantine")
    reason: str | None = quarantine.against(provider)
    return reason


def change_since_locked(offer: Offer, settings: Settings) -> str | None:
    """Return the difference of an offer from the lockfile, or ``None``.

    Opgraft's own offers never differ.

    Raises:
        ConfigError: the lockfile cannot be used.
    """
    if offer.built_in or settings.config.lockfile is None:
        return None
    change: str | None = _lockfile(settings).against(offer.provider)
    return change


def check_admission(settings: Settings) -> None:
    """Check the allow list and the lockfile.

    Raises:
        ConfigError: a plugin on the allow list is not installed, or the lockfile cannot be used.
    """
    check_allow_list(settings)
    if settings.config.lockfile is not None:
        _lockfile(settings)


def lockfile_in_words(path: str | None) -> str:
    """Return words for a lockfile, equal for equal content.

    Raises:
        ConfigError: the lockfile cannot be used.
    """
    if path is None:
        return "none"
    return str(_read_lockfile(path, "the setting lockfile"))


def _lockfile(settings: Settings) -> Any:
    return _read_lockfile(settings.config.lockfile, settings.origins["lockfile"])


def _read_lockfile(path: str | None, origin: str) -> Any:
    return importlib.import_module("opgraft.plugins.locking").lockfile(path, origin)
