"""Installed platforms and plugins as the commands show them, without importing any."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from opgraft.config import Settings
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
    """Return the platforms and plugins among the entry points that are installed."""
    return [offer for offer in discover().offers if offer.group in KINDS]


def as_dict(offer: Offer) -> dict[str, Any]:
    """Return an offer as plain data, with the names that all JSON of opgraft has for it."""
    return {
        "kind": KINDS[offer.group],
        "name": offer.name,
        "provider": offer.provider.to_dict(),
        "entry_point": offer.value,
        "editable": is_editable(discover().distributions.get(offer.provider)),
    }


def admission(offer: Offer, settings: Settings) -> tuple[str, str]:
    """Tell how the settings admit an offer: plugins ``selected``, platforms ``eligible``, or ``rejected`` and why."""
    try:
        against = objection(offer, settings)
    except ConfigError as error:  # of the lockfile, without which nothing is admitted
        against = str(error)
    return (
        ("rejected", against)
        if against
        else ("selected" if offer.group == PLUGIN_GROUP else "eligible", "")
    )


def problems(further: Iterable[Problem] = ()) -> list[dict[str, Any]]:
    """List plugin metadata that cannot be used."""
    return as_dicts((*discover().problems, *further))


def as_dicts(found: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return what was found about distributions as plain data."""
    return [{"provider": one.provider.to_dict(), "reason": one.reason} for one in found]


def metadata_findings() -> Iterator[Finding]:
    """Find what is wrong before anything is imported."""
    for problem in (*discover().problems, *misspelt_groups()):
        message = f"{problem.provider}: {problem.reason}"
        yield Finding(message, problem.provider, problem.location)
    known = {offer.name for offer in shown_offers()}
    for name in host_state().settings().config.plugins_disable or ():
        if not any(offer.answers_to(name) for offer in shown_offers()):
            near = close_matches(name, known)
            yield Finding(f"the deny list names {name!r}, which is not installed: {near}")
    from opgraft.plugins import quarantine  # of which 'detect' needs nothing

    yield from quarantine.findings()


def problem_lines(further: Iterable[Problem] = ()) -> list[str]:
    """List the same in words."""
    return [f"{problem.provider}: {problem.reason}" for problem in (*discover().problems, *further)]


def misspelt_groups() -> Iterator[Problem]:
    """Find groups of entry points that nothing reads and whose name is nearly that of one that opgraft reads."""
    for provider, groups in _groups():
        for group in groups:
            near = _meant(group)
            if group not in (*KINDS, *FOR_OTHER_HOSTS) and near:
                meant = " or ".join(map(repr, near))
                yield Problem(
                    provider,
                    f"nothing reads its entry-point group {group!r}: did you mean {meant}?",
                )


def plugins_of_vllm() -> Iterator[Problem]:
    """Find distributions with entry points for vLLM and none for opgraft, other than vLLM itself, and say what to do.

    Nothing is wrong with them: they are notes, not findings. A bridge loads those that there are then.
    """
    bridged = {offer.provider for offer in discover().offers if offer.bridge}
    for provider, groups in _groups():
        theirs = [f"{group} becomes {ours}" for group, ours in _OF_VLLM.items() if group in groups]
        if (
            theirs
            and not KINDS.keys() & set(groups)
            and normalized(provider.name) != "vllm"
            and provider not in bridged
        ):
            yield Problem(
                provider,
                f"a plugin of vLLM, which opgraft does not load: its entry-point group {' and '.join(theirs)}, and the "
                "imports of its op classes change, or opgraft-vllm-bridge runs it; see docs/how-to/port-from-vllm.md",
            )


def _groups() -> Iterator[tuple[Provider, list[str]]]:
    """Yield the distributions with a group of entry points that may be meant for opgraft, and all their groups.

    Metadata that cannot be read is left to discovery, which tells of it.
    """
    known = discover().groups
    ours = (group for group in known if group in _OF_VLLM or (group not in KINDS and _meant(group)))
    meant = dict.fromkeys(each for group in ours for each in known[group])
    for found in meant:
        with suppress(Exception):  # of metadata that may be anything
            fields = fields_of(found)
            groups = [group for group in known if found in known[group]]
            yield Provider(fields["name"][0], fields["version"][0]), groups


def _meant(group: str) -> list[str]:
    """List the groups of opgraft that another one may be a misspelling of; those of other hosts are none."""
    host = re.split(r"\W|_", group.lower(), maxsplit=1)[0]
    return near_matches(group.lower(), KINDS) if near_matches(host, [HOST_DISTRIBUTION]) else []
