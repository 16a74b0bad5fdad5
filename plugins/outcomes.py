"""Findings about the plugins and platforms of this process, after the load."""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.base.text import printable
from opgraft.config.environment import PLUGINS_DISABLE
from opgraft.errors import near_matches
from opgraft.plugins.discovery import PLATFORM_GROUP, discover
from opgraft.plugins.requirements import FAULTS, QUARANTINED
from opgraft.registry.decision import Provider
from opgraft.registry.declarations import ANY_PLATFORM, Replacement
from opgraft.registry.finding import Finding
from opgraft.registry.state import PluginRecord, PluginStatus, host_state

_PLATFORM_CUTOFF = 0.7
"""Names that are more alike are one name misspelt. 'npu' and 'cpu' are alike by two thirds."""

SLOW = 5.0
"""The seconds of a slow import. The import of torch takes one or two."""


def findings_of(record: PluginRecord) -> Iterator[Finding]:
    """Find the reasons why a plugin, or a part of one, is not active."""
    end = end_of(record)
    if end is not None:
        yield end
    yield from record.findings
    if record.seconds >= SLOW:
        told = f"took {record.seconds:.1f} s to import"
        yield _finding(record, f"{told}, and each process that constructs an op waits for it")
    yield from _misspelt_platforms(record)
    if record.status is PluginStatus.ACTIVATED:
        for replacement in replacements_of(record):
            for complaint in replacement.findings:
                message = f"plugin {record.name} of {replacement.provider}: {complaint}"
                yield Finding(message, replacement.provider, replacement.location)


def end_of(record: PluginRecord) -> Finding | None:
    """Return the finding about an inactive plugin, or ``None`` if there is no fault."""
    if record.status is PluginStatus.FAILED:
        return Finding(failure_of(record), record.provider, record.location, exit_code=4)
    if record.status is PluginStatus.VETOED:
        return _finding(record, f"is not used, as it vetoed itself: {record.reason}")
    if record.status is not PluginStatus.REJECTED or not record.reason.startswith(FAULTS):
        return None
    exit_code = 4 if record.reason.startswith(QUARANTINED) else 1
    return Finding(rejection_of(record), record.provider, record.location, exit_code=exit_code)


def rejection_of(record: PluginRecord) -> str:
    """Return a sentence about a plugin shut out by a fault."""
    return f"plugin {record.name!r} of {record.provider} is not used: {record.reason}"


def failure_of(record: PluginRecord) -> str:
    """Return a sentence about a failed plugin, with the way to go without the plugin."""
    # A reason may end in a question, such as 'did you mean ...?'.
    reason = record.reason if record.reason.endswith("?") else f"{record.reason.rstrip('.')}."
    name = record.name
    return (
        f"plugin {name!r} of {record.provider} failed {reason} Go without it by "
        f"{PLUGINS_DISABLE}={name}; 'opgraft plugins show {name} --load' has the traceback."
    )


def state_of(record: PluginRecord) -> str:
    """Return the status of a plugin with the reason."""
    return f"plugin {record.name} of {record.provider} is {record.status.value}: {record.reason}"


def absence_of(name: str) -> str:
    """Return the states of inactive plugins with a name from a setting."""
    absent = []
    for record in host_state().plugins.values():
        is_meant = name in (record.name, record.provider.name)
        if is_meant and record.reason and record.status is not PluginStatus.ACTIVATED:
            absent.append(state_of(record))
    return printable("; ".join(absent)).rstrip(".")


def replacements_of(record: PluginRecord) -> list[Replacement]:
    """Return the replacements of a plugin, active or not."""
    return [
        replacement
        for replacement in host_state().registry.replacements
        if replacement.plugin == record.name
    ]


def _misspelt_platforms(record: PluginRecord) -> Iterator[Finding]:
    """Find platforms of a plugin without a distribution.

    A name beside an offered one is no fault: the platform may be installed on other machines. A
    name that is nearly the name of another platform is a fault.
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
    is_for_none = bool(unknown) and len(unknown) == len(record.platforms)
    if is_for_none and not any(near.values()):
        named = " and ".join(map(repr, unknown))
        yield _finding(
            record,
            f"states the platforms {named} only, which nothing installed offers, so it never runs "
            f"here: name one of {', '.join(sorted(offered))}, or install what offers {named}",
        )


def _finding(record: PluginRecord, says: str, exit_code: int = 1) -> Finding:
    return Finding(
        f"plugin {record.name} of {record.provider} {says}",
        record.provider,
        record.location,
        exit_code,
    )


def may_patch_torch(provider: Provider) -> bool:
    """Return True if a distribution brings the platform. Its device may need patches of torch.

    Before the platform is chosen, any platform counts.
    """
    names = discover().platforms_of(provider)
    selection = host_state().selection
    return bool(names) if selection is None else selection.platform.name in names
