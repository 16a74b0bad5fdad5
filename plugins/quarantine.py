"""Quarantine of distributions whose code crashed or held up a process.

Later processes leave the distribution alone until a file changes.
"""

from __future__ import annotations

import csv
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from importlib_metadata import Distribution
from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.plugins.discovery import discover, is_editable, normalized
from opgraft.plugins.memory import Memory, digest_of_content, digest_of_text, files_of, states_of
from opgraft.plugins.requirements import QUARANTINED
from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding
from opgraft.registry.state import StateValue

_LONGEST = 1000  # characters of what happened
_UNUSABLE = (OSError, ValueError, TypeError, RecursionError, csv.Error)
_INCOMPARABLE = (OSError, ValueError, csv.Error)
_MEMORY = Memory("quarantine")

TRY_AGAIN = "'opgraft plugins doctor --no-cache' tries it again, as a change of its files does"


@dataclass(frozen=True)
class FailureRecord:
    """A failure of a distribution.

    Attributes:
        name, version: of the distribution.
        digest: the digest of the content.
        states: a digest of the states of its files. Equal states spare reading the content.
        what: what happened.
        since: the time in UTC.
    """

    name: str
    version: str
    digest: str
    states: str
    what: str
    since: str


_REASONS = StateValue[dict[Provider, str | None]](dict)
"""The answers of ``against``."""


def against(provider: Provider) -> str | None:
    """Return the reason for the quarantine of a distribution, or ``None``."""
    reasons = _REASONS.get()
    # Once in a process, as a distribution may have many offers, and gigabytes to compare.
    if provider not in reasons:
        reasons[provider] = _reason(provider)
    return reasons[provider]


def _reason(provider: Provider) -> str | None:
    distribution = discover().distributions.get(provider)
    if distribution is None:  # opgraft itself
        return None
    try:
        record = read(provider.name)
    except _UNUSABLE as error:
        logger.warning("%s", printable(_unusable(provider, error)), extra=provider.attributes())
        return None
    if record is None:
        return None
    what = record.what
    try:
        if not _holds_for(record, provider, distribution):
            return None
    except _INCOMPARABLE as error:
        # The plugin may still crash each process.
        what += f"; nothing tells whether its files have changed: {described(error)}"
    return f"{QUARANTINED}{record.since}: {what}; {TRY_AGAIN}"


def _holds_for(record: FailureRecord, provider: Provider, distribution: Distribution) -> bool:
    """Return True if the content is the same as in a record. Forget the record of other content.

    Raises:
        OSError, ValueError, csv.Error: the content cannot be read.
    """
    name = normalized(provider.name)
    if record.version == str(provider.version):
        # The states first: each start would read the content, perhaps gigabytes of libraries.
        states = _states(distribution)
        if states == record.states:
            return True
        # The same wheel installed again has new times, and the same fault.
        if digest_of_content(distribution) == record.digest:
            with suppress(OSError, RuntimeError):  # the next start reads the content again
                _MEMORY.write(name, asdict(replace(record, states=states)))
            return True
    # Otherwise each later start would compare the content again.
    with suppress(OSError):
        _MEMORY.forget(name)
    return False


def read(name: str) -> FailureRecord | None:
    """Return the record of a distribution, ``None`` if there is none.

    Raises:
        OSError, ValueError, TypeError, RecursionError: the record cannot be used.
    """
    data = _MEMORY.read(normalized(name))
    return FailureRecord(**data) if data is not None else None


def confine(provider: Provider, what: str) -> str:
    """Leave a distribution alone from now on; returns the consequence in words.

    An editable install is tried again, as its source can change without a trace in its metadata.
    So is a distribution without RECORD, the list of its files.
    """
    again = "it is tried again next time"
    # Only installed distributions have content to compare later.
    distribution = discover().distributions.get(provider)
    if distribution is None:
        return again
    if is_editable(distribution):
        return f"{again}, as it is an editable install"
    try:
        states = _states(distribution)
        digest = digest_of_content(distribution)
    except _INCOMPARABLE as error:
        return f"{again}, as nothing tells this installation from others: {described(error)}"
    since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    version = str(provider.version)
    # The reason ends up in each message, so its length has a limit.
    record = FailureRecord(provider.name, version, digest, states, what[:_LONGEST], since)
    try:
        _MEMORY.write(normalized(provider.name), asdict(record))
    except RuntimeError:
        return f"{again}, as there is no home folder in which to remember it"
    except OSError as error:
        why = error.strerror or described(error)
        return f"{again}, as {_MEMORY.path(normalized(provider.name))} cannot be written: {why}"
    # A new one, as another thread may still put a former answer into the old one.
    _REASONS.set({})
    return f"it is in quarantine from now on: {TRY_AGAIN}"


def forget_all() -> None:
    """Remove the records of all installed distributions, to try each again."""
    for provider in discover().distributions:
        with suppress(OSError):  # a record that cannot be removed is a finding
            _MEMORY.forget(normalized(provider.name))
    _REASONS.set({})


def findings() -> list[Finding]:
    """Find unusable records of installed distributions. Such a record does not count."""
    found = []
    for provider in discover().distributions:
        try:
            read(provider.name)
        except _UNUSABLE as error:
            found.append(Finding(_unusable(provider, error), provider))
    return found


def _states(distribution: Distribution) -> str:
    """Return a digest of the states of files.

    Raises:
        OSError, ValueError, csv.Error: the RECORD or a state cannot be read.
    """
    return digest_of_text(repr(states_of(files_of(distribution))))


def _unusable(provider: Provider, error: Exception) -> str:
    why = error.strerror if isinstance(error, OSError) and error.strerror else described(error)
    path = _MEMORY.path(normalized(provider.name))
    return (
        f"the record of a quarantine of {provider}, {path}, cannot be used and does not count: "
        f"{why}: 'opgraft plugins doctor --no-cache' removes it"
    )
