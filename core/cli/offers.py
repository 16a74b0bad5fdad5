"""Installed platforms and plugins for the output of commands. None of them is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from opgraft.config import Settings
from opgraft.config.plugin_settings import SETTINGS_GROUP
from opgraft.errors import ConfigError, close_matches, near_matches
from opgraft.plugins.admission import objection
from opgraft.plugins.discovery import (
    FOR_OTHER_HOSTS,
    HOST_DISTRIBUTION,
    PLATFORM_GROUP,
    PLUGIN_GROUP,
    Offer,
    discover,
    is_editable,
    normalized,
)
from opgraft.plugins.metadata import Problem, fields_of
from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding
from opgraft.registry.state import host_state

KINDS = {PLATFORM_GROUP: "platform", PLUGIN_GROUP: "plugin"}
_OF_VLLM = {"vllm.platform_plugins": PLATFORM_GROUP, "vllm.general_plugins": PLUGIN_GROUP}


def shown_offers() -> list[Offer]:
    """Return the platforms and plugins among the installed entry points."""
    return [offer for offer in discover().offers if offer.group in KINDS]


def as_dict(offer: Offer) -> dict[str, Any]:
    """Return an offer as plain data, with the same keys in all JSON of opgraft."""
    return {
        "kind": KINDS[offer.group],
        "name": offer.name,
        "provider": offer.provider.to_dict(),
        "entry_point": offer.value,
        "editable": is_editable(discover().distributions.get(offer.provider)),
    }


def admission(offer: Offer, settings: Settings) -> tuple[str, str]:
    """Return the status of an offer under the settings, and the reason of a rejection.

    The status is ``selected`` for plugins, ``eligible`` for platforms, or ``rejected``.
    """
    try:
        against = objection(offer, settings)
    # Of the lockfile. Without a valid lockfile, nothing is admitted.
    except ConfigError as error:
        against = str(error)
    if against:
        return "rejected", against
    return ("selected" if offer.group == PLUGIN_GROUP else "eligible"), ""


def problems(further: Iterable[Problem] = ()) -> list[dict[str, Any]]:
    """Return unusable metadata of plugins as plain data, with ``further`` problems."""
    return as_dicts((*discover().problems, *further))


def as_dicts(found: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return problems of distributions as plain data."""
    return [{"provider": one.provider.to_dict(), "reason": one.reason} for one in found]


def metadata_findings() -> Iterator[Finding]:
    """Yield findings about metadata and settings, before any import."""
    for problem in (*discover().problems, *misspelt_groups()):
        message = f"{problem.provider}: {problem.reason}"
        yield Finding(message, problem.provider, problem.location)
    known = {offer.name for offer in shown_offers()}
    for name in host_state().settings().config.plugins_disable or ():
        if not any(offer.answers_to(name) for offer in shown_offers()):
            near = close_matches(name, known)
            yield Finding(f"the deny list names {name!r}, which is not installed: {near}")
    # Imported here, because 'detect' needs no quarantine.
    from opgraft.plugins import quarantine

    yield from quarantine.findings()


def problem_lines(further: Iterable[Problem] = ()) -> list[str]:
    """Return unusable metadata of plugins as lines, with ``further`` problems."""
    return [f"{problem.provider}: {problem.reason}" for problem in (*discover().problems, *further)]


def misspelt_groups() -> Iterator[Problem]:
    """Yield groups of entry points that nobody reads, with a name near one of opgraft's groups."""
    for provider, groups in _groups_meant_for_opgraft():
        for group in groups:
            near = _meant(group)
            if not near or group in (*KINDS, SETTINGS_GROUP, *FOR_OTHER_HOSTS):
                continue
            meant = " or ".join(map(repr, near))
            reason = f"nothing reads its entry-point group {group!r}: did you mean {meant}?"
            yield Problem(provider, reason)


def plugins_of_vllm() -> Iterator[Problem]:
    """Yield plugins of vLLM that opgraft does not load, with the next step.

    These are distributions with entry points for vLLM and none for opgraft, other than vLLM itself.
    They are notes, not findings, because nothing is wrong. Plugins behind a bridge are left out.
    """
    bridged = {offer.provider for offer in discover().offers if offer.bridge}
    for provider, groups in _groups_meant_for_opgraft():
        theirs = [f"{group} becomes {ours}" for group, ours in _OF_VLLM.items() if group in groups]
        if not theirs or KINDS.keys() & set(groups):
            continue
        if normalized(provider.name) == "vllm" or provider in bridged:
            continue
        yield Problem(
            provider,
            "a plugin of vLLM, which opgraft does not load: its entry-point group "
            f"{' and '.join(theirs)}, and the imports of its op classes change, or "
            "opgraft-vllm-bridge runs it; see docs/how-to/port-from-vllm.md",
        )


def _groups_meant_for_opgraft() -> Iterator[tuple[Provider, list[str]]]:
    """Yield distributions with a group of entry points that may be meant for opgraft.

    Each comes with all groups of the distribution. Discovery reports unreadable metadata.
    """
    known = discover().groups
    # A dictionary, as a set with an order.
    meant: dict[Any, None] = {}
    for group, distributions in known.items():
        if group in _OF_VLLM or (group not in KINDS and _meant(group)):
            meant.update(dict.fromkeys(distributions))
    for found in meant:
        # Damaged metadata may raise any error.
        with suppress(Exception):
            fields = fields_of(found)
            groups = [group for group in known if found in known[group]]
            yield Provider(fields["name"][0], fields["version"][0]), groups


def _meant(group: str) -> list[str]:
    """Return the groups of opgraft that a misspelt group may stand for; none for other hosts."""
    spelled = group.strip().lower()
    host = re.split(r"\W|_", spelled, maxsplit=1)[0]
    # Groups of other programs end like opgraft's, such as "pytest.plugins".
    if not near_matches(host, [HOST_DISTRIBUTION]):
        return []
    return near_matches(spelled, [*KINDS, SETTINGS_GROUP])
