"""Quarantine of distributions whose code crashed or held up a process.

Later processes leave the distribution alone until a file changes.
"""

from __future__ import annotations

import csv
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from importlib_metadata import Distribution
from opgraft.base.text import described, printable
from opgraft.logger import logger
from opgraft.plugins.discovery import discover, is_editable, normalized
from opgraft.plugins.memory import Memory, digest_of_content, digest_of_text, files_of, states_of
from opgraft.plugins.requirements import QUARANTINED
from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding

_LONGEST = 1000  # characters of what happened
_UNUSABLE = (OSError, ValueError, TypeError, RecursionError, csv.Error)
_MEMORY = Memory("quarantine")

TRY_AGAIN = "'opgraft plugins doctor --no-cache' tries it again, as a change of its files does"


@dataclass(frozen=True)
class Record:
    """A failure of a distribution.

    Attributes:
        name, version: of the distribution.
        digest: the digest of the content.
        states: a digest of the states of its files. As long as they are the same, the content is
            not read.
        what: what happened.
        since: the time in UTC.
    """

    name: str
    version: str
    digest: str
    states: str
    what: str
    since: str

    def is_of(self, distribution: Distribution) -> bool:
        """Return True if the distribution has the same content.

        Raises:
            OSError, ValueError, csv.Error: the metadata cannot be read.
        """
        # The states first: each start would read the content, perhaps gigabytes of libraries.
        if self.states and _states(distribution) == self.states:
            return True
        # The same wheel installed again has new times, and the same fault.
        return digest_of_content(distribution) == self.digest


def against(provider: Provider) -> str | None:
    """Return the reason for the quarantine of a distribution, or ``None``."""
    distribution = discover().distributions.get(provider)
    if distribution is None:  # opgraft itself
        return None
    try:
        record = read(provider.name)
        if record is None or not record.is_of(distribution):
            return None
        return f"{QUARANTINED}{record.since}: {record.what}; {TRY_AGAIN}"
    except _UNUSABLE as error:
        logger.warning("%s", printable(_unusable(provider, error)), extra=provider.attributes())
        return None


def read(name: str) -> Record | None:
    """Return the record of a distribution, ``None`` if there is none.

    Raises:
        OSError, ValueError, TypeError, RecursionError: the record cannot be used.
    """
    data = _MEMORY.read(normalized(name))
    return Record(**data) if data is not None else None


def confine(provider: Provider, what: str) -> str:
    """Leave a distribution alone from now on; returns the consequence in words.

    An editable install is tried again, as its source can change without a trace in its metadata.
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
    except (OSError, ValueError, csv.Error) as error:
        return f"{again}, as nothing tells this installation from others: {described(error)}"
    since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    version = str(provider.version)
    # The reason ends up in each message, so its length has a limit.
    record = Record(provider.name, version, digest, states, what[:_LONGEST], since)
    try:
        _MEMORY.write(normalized(provider.name), asdict(record))
    except RuntimeError:
        return f"{again}, as there is no home folder in which to remember it"
    except OSError as error:
        why = error.strerror or described(error)
        return f"{again}, as {_MEMORY.path(normalized(provider.name))} cannot be written: {why}"
    return f"it is in quarantine from now on: {TRY_AGAIN}"


def forget_all() -> None:
    """Remove the records of all installed distributions, to try each again."""
    for provider in discover().distributions:
        with suppress(OSError):  # a record that cannot be removed is a finding
            _MEMORY.forget(normalized(provider.name))


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
    """Return a digest of the states of files, empty if no RECORD lists files."""
    states = states_of(files_of(distribution))
    return digest_of_text(repr(states)) if states else ""


def _unusable(provider: Provider, error: Exception) -> str:
    why = error.strerror if isinstance(error, OSError) and error.strerror else described(error)
    path = _MEMORY.path(normalized(provider.name))
    return (
        f"the record of a quarantine of {provider}, {path}, cannot be used and does not count: "
        f"{why}: 'opgraft plugins doctor --no-cache' removes it"
    )
