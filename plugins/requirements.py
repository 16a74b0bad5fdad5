"""Checks of offers against lists of the settings and version requirements."""

from __future__ import annotations

from collections.abc import Iterable

from opgraft.base.installed import version_of
from opgraft.base.version import __version__
from opgraft.config import OpgraftConfig, Settings
from opgraft.errors import ConfigError, PluginError, close_matches
from opgraft.plugins.discovery import (
    FOR_OTHER_HOSTS,
    HOST_DISTRIBUTION,
    Offer,
    discover,
    normalized,
)

_EARLY = ("platform", "plugins", "plugins_disable", "lockfile", "strict")
"""Settings that are decided before a platform or plugin is asked."""

QUARANTINED = "in quarantine since "
"""The beginning of the reason against an offer in quarantine."""

LOCKED_OUT = "locked out by "
"""The beginning of the reason against an offer that differs from the lockfile."""

FAULTS = ("it requires", "its requirement", LOCKED_OUT, QUARANTINED)
"""Beginnings of reasons that are faults. Other reasons are wishes of the user.

By the text, not by a type: ``opgraft plugins doctor`` reads reasons of another process.
"""


def unfit(offer: Offer, settings: Settings) -> str | None:
    """Return the reason against an offer, or ``None``: a list of the user, or a version."""
    if offer.built_in:
        return None
    config = settings.config
    if asked_for(offer, config.plugins_disable or ()):
        return f"on the deny list {settings.named('plugins_disable')}"
    # A plugin on the list has its bridge run, too.
    needs_name = config.plugins is not None and offer.group not in FOR_OTHER_HOSTS
    if needs_name and not asked_for(offer, config.plugins or ()):
        return f"not on the allow list {settings.named('plugins')}"
    return _unmet_requirement(offer)


def asked_for(offer: Offer, names: Iterable[str]) -> bool:
    """Return True if a list of names from a setting has this offer."""
    return any(offer.answers_to(name) for name in names)


def check_adjustment(config: OpgraftConfig) -> None:
    """Reject defaults of settings with an early decision.

    Raises:
        PluginError: one of these settings has a value.
    """
    early = [name for name in _EARLY if getattr(config, name) is not None]
    if early:
        raise PluginError(
            f"it sets {', '.join(early)}, which was decided before it was asked: leave it unset"
        )


def check_allow_list(settings: Settings) -> None:
    """Check the plugins on the allow list.

    Raises:
        ConfigError: no offer answers to a name; close matches are named.
    """
    known = discover().offers
    for name in settings.config.plugins or ():
        if any(offer.answers_to(name) for offer in known):
            continue
        names = {offer.name for offer in known} | {offer.provider.name for offer in known}
        near = close_matches(name, names)
        origin = settings.origins["plugins"]
        raise ConfigError(f"plugins names {name!r} ({origin}), which is not installed: {near}")


def _unmet_requirement(offer: Offer) -> str | None:
    """Return the first unmet requirement on opgraft or torch in words, or ``None``."""
    if not offer.requires:
        return None
    from packaging.requirements import Requirement  # takes 20 ms, for few plugins

    for line in offer.requires:
        try:
            requirement = Requirement(line)
            name = normalized(requirement.name)
            version = __version__ if name == HOST_DISTRIBUTION else version_of(name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            # torch from a build folder may have no metadata, and so no version before its import.
            fits = version is None or requirement.specifier.contains(version, prereleases=True)
        except (ValueError, LookupError) as error:  # of its form, or of its marker
            return f"its requirement {line!r} is malformed: {error}"
        if applies and not fits:
            return f"it requires {line!r}, this is {name} {version}: install one of them that fits"
    return None
