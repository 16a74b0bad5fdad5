"""Findings about what became of the plugins and platforms of this process."""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.base.text import printable
from opgraft.config.environment import PLUGINS_DISABLE
from opgraft.errors import near_matches
from opgraft.plugins.discovery import PLATFORM_GROUP, discover
from opgraft.plugins.requirements import FAULTS, QUARANTINED
from opgraft.registry.declarations import ANY_PLATFORM, Replacement
from opgraft.registry.finding import Finding
from opgraft.registry.state import PluginRecord, PluginStatus, host_state

_PLATFORM_CUTOFF = 0.7
"""Above it two names of platforms are one misspelt; 'npu' and 'cpu', at two thirds, are two vendors' words."""

SLOW = 5.0
"""Seconds from which on an import is slow; that of torch takes one or two."""


def findings_of(record: PluginRecord) -> Iterator[Finding]:
    """Find why a plugin is not active, or not in every part."""
    end = end_of(record)
    if end is not None:
        yield end
    yield from record.findings
    if record.seconds >= SLOW:
        yield _finding(
            record,
            f"took {record.seconds:.1f} s to import, and each process that constructs an op waits for it",
        )
    yield from _misspelt_platforms(record)
    if record.status is PluginStatus.ACTIVATED:
        for replacement in replacements_of(record):
            for complaint in replacement.findings:
                message = f"plugin {record.name} of {replacement.provider}: {complaint}"
                yield Finding(message, replacement.provider, replacement.location)


def end_of(record: PluginRecord) -> Finding | None:
    """Return the finding that tells why a plugin is not active, or ``None`` where that is no fault."""
    if record.status is PluginStatus.FAILED:
        return Finding(failure_of(record), record.provider, record.location, exit_code=4)
    if record.status is PluginStatus.VETOED:
        return _finding(record, f"is not used, as it vetoed itself: {record.reason}")
    if record.status is PluginStatus.REJECTED and record.reason.startswith(FAULTS):
        exit_code = 4 if record.reason.startswith(QUARANTINED) else 1
        return Finding(rejection_of(record), record.provider, record.location, exit_code=exit_code)
    return None


def rejection_of(record: PluginRecord) -> str:
    """Tell of a plugin that is shut out by what is wrong with it."""
    return f"plugin {record.name!r} of {record.provider} is not used: {record.reason}"


def failure_of(record: PluginRecord) -> str:
    """Tell of a plugin that failed: why, how to go without it, and where its traceback is."""
    reason = record.reason if record.reason.endswith("?") else f"{record.reason.rstrip('.')}."
    return (
        f"plugin {record.name!r} of {record.provider} failed {reason} Go without it by "
        f"{PLUGINS_DISABLE}={record.name}; 'opgraft plugins show {record.name} --load' has the traceback."
    )


def state_of(record: PluginRecord) -> str:
    """Tell how far a plugin came, and why no further."""
    return f"plugin {record.name} of {record.provider} is {record.status.value}: {record.reason}"


def absence_of(name: str) -> str:
    """Say why plugins that a setting means by ``name``, theirs or their distribution's, are not active."""
    meant = (
        record
        for record in host_state().plugins.values()
        if name in (record.name, record.provider.name)
    )
    absent = [
        state_of(record)
        for record in meant
        if record.status is not PluginStatus.ACTIVATED and record.reason
    ]
    return printable("; ".join(absent)).rstrip(".")


def replacements_of(record: PluginRecord) -> list[Replacement]:
    """Return what a plugin declares, whether or not it is active."""
    return [
        replacement
        for replacement in host_state().registry.replacements
        if replacement.plugin == record.name
    ]


def _misspelt_platforms(record: PluginRecord) -> Iterator[Finding]:
    """Find platforms that a plugin states and no distribution offers.

    A name beside one that is offered is no fault, unless it is nearly that of another platform: its platform may be
    installed on other machines.
    """
    offered = {offer.name for offer in discover().of_group(PLATFORM_GROUP)}
    unknown = [name for name in record.platforms if name not in (*offered, ANY_PLATFORM)]
    near = {name: near_matches(name.lower(), offered, _PLATFORM_CUTOFF) for name in unknown}
    for name in filter(near.get, unknown):
        words = " or ".join(map(repr, near[name]))
        yield _finding(
            record,
            f"states the platform {name!r}, which nothing installed offers: did you mean {words}?",
        )
    if unknown and len(unknown) == len(record.platforms) and not any(near.values()):
        named = " and ".join(map(repr, unknown))
        yield _finding(
            record,
            f"states the platforms {named} only, which nothing installed offers, so it never runs here: name one of "
            f"{', '.join(sorted(offered))}, or install what offers {named}",
        )


def _finding(record: PluginRecord, says: str, exit_code: int = 1) -> Finding:
    return Finding(
        f"plugin {record.name} of {record.provider} {says}",
        record.provider,
        record.location,
        exit_code,
    )
