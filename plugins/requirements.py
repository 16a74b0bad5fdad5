"""Checks of what a distribution offers, against settings and version requirements."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from opgraft.base.installed import version_of
from opgraft.config import OpgraftConfig, Settings
from opgraft.errors import ConfigError, PluginError, close_matches
from opgraft.plugins.discovery import (
    FOR_OTHER_HOSTS,
    HOST_DISTRIBUTION,
    Offer,
    discover,
    normalized,
)
from opgraft.registry.decision import Provider
from opgraft.version import __version__

_EARLY = ("platform", "plugins", "plugins_disable", "lockfile", "strict")
"""Settings that are decided before a platform or plugin is asked."""

QUARANTINED = "in quarantine since "
"""The beginning of the reason of an offer that is left alone for what it did before."""

LOCKED_OUT = "locked out by "
"""The beginning of the reason of an offer that the lockfile speaks against."""

FAULTS = ("it requires", "its requirement", LOCKED_OUT, QUARANTINED)
"""Beginnings of reasons for rejecting an offer that are faults, not wishes."""


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


def unfit(offer: Offer, settings: Settings) -> str | None:
    """Say why an offer is not used: on the deny list, not on the allow list, or for another opgraft; else ``None``."""
    if offer.built_in:
        return None
    config = settings.config
    if asked_for(offer, config.plugins_disable or ()):
        return f"on the deny list {settings.named('plugins_disable')}"
    # Who names a plugin has its bridge run, too.
    if (
        config.plugins is not None
        and offer.group not in FOR_OTHER_HOSTS
        and not asked_for(offer, config.plugins)
    ):
        return f"not on the allow list {settings.named('plugins')}"
    return _unmet_requirement(offer)


def asked_for(offer: Offer, names: Iterable[str]) -> bool:
    """Tell whether a list of names from a setting holds this offer."""
    return any(offer.answers_to(name) for name in names)


def check_adjustment(config: OpgraftConfig) -> None:
    """Reject defaults that a platform or plugin may not change, since they are decided before it is asked.

    Raises:
        PluginError: one of them is set.
    """
    early = [name for name in _EARLY if getattr(config, name) is not None]
    if early:
        raise PluginError(
            f"it sets {', '.join(early)}, which was decided before it was asked: leave it unset"
        )


def check_admission(settings: Settings) -> None:
    """Reject an allow list that names a plugin which is not installed, and a lockfile that cannot be used.

    Raises:
        ConfigError: for an unknown name with close matches.
    """
    check_allow_list(settings)
    if settings.config.lockfile is not None:
        _lockfile(settings)


def check_allow_list(settings: Settings) -> None:
    """Reject an allow list that names a plugin which is not installed.

    Raises:
        ConfigError: a name that no offer answers to, with close matches.
    """
    known = discover().offers
    for name in settings.config.plugins or ():
        if not any(offer.answers_to(name) for offer in known):
            near = close_matches(
                name, {offer.name for offer in known} | {offer.provider.name for offer in known}
            )
            raise ConfigError(
                f"plugins names {name!r} ({settings.origins['plugins']}), which is not installed: {near}"
            )


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


def _unmet_requirement(offer: Offer) -> str | None:
    """Say which requirement on opgraft, or on the torch that is installed, is not met; ``None`` if all are."""
    if not offer.requires:
        return None
    from packaging.requirements import Requirement  # costs 20 ms, only some plugins need it

    for line in offer.requires:
        try:
            requirement = Requirement(line)
            name = normalized(requirement.name)
            version = __version__ if name == HOST_DISTRIBUTION else version_of(name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            # One that runs without metadata, as torch from a build folder may, has no version before it is imported.
            fits = version is None or requirement.specifier.contains(version, prereleases=True)
        except (ValueError, LookupError) as error:  # of its form, or of its marker
            return f"its requirement {line!r} is malformed: {error}"
        if applies and not fits:
            return f"it requires {line!r}, this is {name} {version}: install one of them that fits"
    return None
