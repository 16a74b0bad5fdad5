"""Checks of what a distribution offers, against lists of the settings and version requirements."""

from __future__ import annotations

from collections.abc import Iterable

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
from opgraft.version import __version__

_EARLY = ("platform", "plugins", "plugins_disable", "lockfile", "strict")
"""Settings that are decided before a platform or plugin is asked."""

QUARANTINED = "in quarantine since "
"""The beginning of the reason of an offer that is left alone for what it did before."""

LOCKED_OUT = "locked out by "
"""The beginning of the reason of an offer that the lockfile speaks against."""

FAULTS = ("it requires", "its requirement", LOCKED_OUT, QUARANTINED)
"""Beginnings of reasons for rejecting an offer that are faults, not wishes."""


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
