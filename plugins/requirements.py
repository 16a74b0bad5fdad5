"""Checks of what a distribution offers, against settings and version requirements."""

from __future__ import annotations

from collections.abc import Iterable

from opgraft.config import OpgraftConfig, Settings
from opgraft.errors import ConfigError, PluginError, close_matches
from opgraft.plugins.discovery import Offer, discover
from opgraft.version import __version__


def objection(offer: Offer, settings: Settings) -> str | None:
    """Say why an offer is not used, or ``None``: not on the allow list, on the deny list, or for another opgraft."""
    if offer.built_in:
        return None
    config = settings.config
    if asked_for(offer, config.plugins_disable or ()):
        return f"on the deny list {settings.named('plugins_disable')}"
    if config.plugins is not None and not asked_for(offer, config.plugins):
        return f"not on the allow list {settings.named('plugins')}"
    return _unmet_requirement(offer)


def asked_for(offer: Offer, names: Iterable[str]) -> bool:
    """Tell whether a list of names from a setting holds this offer."""
    return any(offer.answers_to(name) for name in names)


def check_adjustment(config: OpgraftConfig) -> None:
    """Reject defaults that a platform or plugin may not change, since they are decided before it is asked.

    Raises:
        PluginError: ``platform``, ``plugins``, ``plugins_disable`` or ``strict`` is set.
    """
    early = [name for name in ("platform", "plugins", "plugins_disable", "strict") if getattr(config, name) is not None]
    if early:
        raise PluginError(f"it sets {', '.join(early)}, which was decided before it was asked: leave it unset")


def check_allow_list(settings: Settings) -> None:
    """Reject an allow list that names a plugin which is not installed.

    Raises:
        ConfigError: a name that no offer answers to, with close matches.
    """
    known = discover().offers
    for name in settings.config.plugins or ():
        if not any(offer.answers_to(name) for offer in known):
            near = close_matches(name, {offer.name for offer in known} | {offer.provider.name for offer in known})
            raise ConfigError(f"plugins names {name!r} ({settings.origins['plugins']}), which is not installed: {near}")


def _unmet_requirement(offer: Offer) -> str | None:
    if not offer.requires:
        return None
    from packaging.requirements import InvalidRequirement, Requirement  # costs 20 ms, only some plugins need it

    for line in offer.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            return f"its requirement {line!r} is malformed: {error}"
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and not requirement.specifier.contains(__version__, prereleases=True):
            return f"it requires {line!r}, this is opgraft {__version__}: install one of them that fits"
    return None
