"""Installed platforms and plugins as the commands show them, without importing any."""

from __future__ import annotations

from typing import Any

from opgraft.config import OpgraftConfig
from opgraft.plugins.discovery import PLATFORM_GROUP, PLUGIN_GROUP, Offer, discover
from opgraft.plugins.requirements import objection

KINDS = {PLATFORM_GROUP: "platform", PLUGIN_GROUP: "plugin"}


def shown_offers() -> list[Offer]:
    """Return the platforms and plugins among the entry points that are installed."""
    return [offer for offer in discover().offers if offer.group in KINDS]


def as_dict(offer: Offer) -> dict[str, Any]:
    """Return an offer as plain data, with the names that all JSON of opgraft has for it."""
    return {
        "kind": KINDS[offer.group],
        "name": offer.name,
        "provider": offer.provider.to_dict(),
        "entry_point": offer.value,
    }


def admission(offer: Offer, config: OpgraftConfig) -> tuple[str, str]:
    """Tell how the settings admit an offer: plugins ``selected``, platforms ``eligible``, or ``rejected`` and why."""
    against = objection(offer, config)
    return ("rejected", against) if against else ("selected" if offer.group == PLUGIN_GROUP else "eligible", "")


def problems() -> list[dict[str, Any]]:
    """List plugin metadata that cannot be used."""
    return [{"provider": problem.provider.to_dict(), "reason": problem.reason} for problem in discover().problems]


def problem_lines() -> list[str]:
    """List the same in words."""
    return [f"{problem.provider}: {problem.reason}" for problem in discover().problems]
