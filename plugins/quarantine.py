"""Quarantine: distributions whose code took down or held up the process that tried it, left alone until they change.

Each has a record in a file of its own, in the user's folder of states, so that processes which write at once lose none.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from importlib_metadata import Distribution
from opgraft.base.files import read_regular, replace_file
from opgraft.base.text import described, printable
from opgraft.config.environment import state_home
from opgraft.logger import logger
from opgraft.plugins.discovery import discover, is_editable, normalized
from opgraft.plugins.metadata import text_of
from opgraft.plugins.requirements import QUARANTINED
from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding

_SCHEMA = "opgraft.quarantine/1"
_LARGEST = 1 << 16  # bytes of a record
_LONGEST = 1000  # characters of what happened


@dataclass(frozen=True)
class Record:
    """A distribution in quarantine: ``digest`` tells this installation from others, ``since`` is a time in UTC."""

    name: str
    version: str
    digest: str
    what: str
    since: str

    @property
    def reason(self) -> str:
        """Say what happened, when, and how it is tried again."""
        return f"{QUARANTINED}{self.since}: {self.what}; {_way_out(self.name)}"


def against(provider: Provider) -> str | None:
    """Say why a distribution is left alone, or ``None``. A record of another version or installation does not count."""
    distribution = discover().distributions.get(provider)
    if distribution is None:  # opgraft itself
        return None
    try:
        record = read(provider.name)
        return (
            record.reason if record is not None and record.digest == _digest(distribution) else None
        )
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s", printable(_unusable(provider, error)), extra=provider.attributes())
        return None


def read(name: str) -> Record | None:
    """Return the record of a distribution, ``None`` where there is none.

    Raises:
        OSError, ValueError, RecursionError: it cannot be read, or is none.
    """
    path = _path(name)
    try:
        content = json.loads(read_regular(path, _LARGEST)) if path is not None else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    if content is None:
        return None
    texts = Record.__dataclass_fields__.keys()
    if (
        not isinstance(content, dict)
        or content.keys() != {"schema", *texts}
        or content.pop("schema") != _SCHEMA
    ):
        raise ValueError(f"it holds no object of the schema {_SCHEMA!r}")
    if not all(isinstance(value, str) for value in content.values()):
        raise ValueError("it holds other values than strings")
    return Record(**content)


def confine(provider: Provider, what: str) -> str:
    """Leave a distribution alone from now on, for ``what`` happened; returns what comes of it, in words.

    An editable install is tried again, as its source can change without a trace in its metadata.
    """
    distribution = discover().distributions.get(provider)
    if distribution is None:
        return "it is tried again next time"
    if is_editable(distribution):
        return "it is tried again next time, as it is an editable install"
    path = _path(provider.name)
    if path is None:
        return "it is tried again next time, as there is no home folder in which to remember it"
    since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    try:
        digest = _digest(distribution)
    except (OSError, ValueError) as error:
        return f"it is tried again next time, as nothing tells this installation from others: {described(error)}"
    record = Record(provider.name, str(provider.version), digest, what[:_LONGEST], since)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, json.dumps({"schema": _SCHEMA, **asdict(record)}), 0o600)
    except OSError as error:
        why = error.strerror or described(error)
        return f"it is tried again next time, as {path} cannot be written: {why}"
    return f"it is in quarantine from now on: {_way_out(provider.name)}"


def release(name: str) -> bool:
    """Remove the record of a distribution, whatever it holds; tells whether there was one.

    Raises:
        OSError: it cannot be removed.
    """
    path = _path(name)
    try:
        if path is not None:
            path.unlink()
            return True
    except (FileNotFoundError, NotADirectoryError):
        pass
    return False


def findings() -> list[Finding]:
    """Find records of installed distributions that cannot be used, and so do not count."""
    found = []
    for provider in discover().distributions:
        try:
            read(provider.name)
        except (OSError, ValueError, RecursionError) as error:
            found.append(Finding(_unusable(provider, error), provider))
    return found


def _unusable(provider: Provider, error: Exception) -> str:
    why = error.strerror if isinstance(error, OSError) and error.strerror else described(error)
    return (
        f"the record of a quarantine of {provider}, {_path(provider.name)}, cannot be used and does not count: {why}: "
        f"'opgraft plugins release {provider.name}' removes it"
    )


def _way_out(name: str) -> str:
    return f"'opgraft plugins release {name}' has it tried again, as another version is"


def _digest(distribution: Distribution) -> str:
    """Return a digest of what an installer wrote down of a distribution; of one without RECORD, of its metadata.

    Raises:
        OSError, ValueError: that cannot be read.
    """
    import hashlib  # which start-up does not need, unless there is a record

    texts = (text_of(distribution, name) for name in ("RECORD", "METADATA", "PKG-INFO"))
    return hashlib.sha256(next(filter(None, texts), "").encode(errors="surrogatepass")).hexdigest()


def _path(name: str) -> Path | None:
    try:
        # Surrogates too, which stand in an argument for bytes that are no UTF-8.
        file = quote(normalized(name), safe="", errors="surrogatepass")
        return state_home() / "opgraft" / "quarantine" / f"{file}.json"
    except RuntimeError:  # nobody knows where the home folder is
        return None
