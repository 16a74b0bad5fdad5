"""Installed platforms and plugins as the commands show them, without importing any."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import importlib_metadata
from opgraft.config import Settings
from opgraft.decision import Provider
from opgraft.errors import near_matches
from opgraft.plugins.discovery import PLATFORM_GROUP, PLUGIN_GROUP, Offer, Problem, discover
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


def admission(offer: Offer, settings: Settings) -> tuple[str, str]:
    """Tell how the settings admit an offer: plugins ``selected``, platforms ``eligible``, or ``rejected`` and why."""
    against = objection(offer, settings)
    return ("rejected", against) if against else ("selected" if offer.group == PLUGIN_GROUP else "eligible", "")


def problems(further: Iterable[Problem] = ()) -> list[dict[str, Any]]:
    """List plugin metadata that cannot be used."""
    return [{"provider": p.provider.to_dict(), "reason": p.reason} for p in (*discover().problems, *further)]


def problem_lines(further: Iterable[Problem] = ()) -> list[str]:
    """List the same in words."""
    return [f"{problem.provider}: {problem.reason}" for problem in (*discover().problems, *further)]


def misspelt_groups() -> Iterator[Problem]:
    """Find groups of entry points that nothing reads and whose name is nearly that of one that opgraft reads."""
    for distribution in importlib_metadata.Distribution.discover():
        text = distribution.read_text("entry_points.txt") or ""
        for group in re.findall(r"^\s*\[([^\]\n]+)\]\s*$", text, re.M):
            near = near_matches(group, KINDS)
            if group not in KINDS and near:
                provider = Provider(str(distribution.metadata["Name"]), distribution.version)
                meant = " or ".join(map(repr, near))
                yield Problem(provider, f"nothing reads its entry-point group {group!r}: did you mean {meant}?")
