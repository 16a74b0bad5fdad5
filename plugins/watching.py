"""Knowing whose code runs, for when it takes the process down."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from opgraft.decision import Provider
from opgraft.text import printable

logger = logging.getLogger("opgraft.watching")


class Listener(Protocol):
    """Hear of the code of others: when it begins and when it ends."""

    def begins(self, what: str, provider: Provider | None) -> None: ...

    def ends(self) -> None: ...


LISTENERS: list[Listener] = []
"""Told directly, as the log is something that a plugin can switch off with one call, often by mistake."""


@contextmanager
def watched(what: str, provider: Provider | None) -> Iterator[None]:
    """Tell when the code of ``provider`` begins and ends, at level DEBUG too; ``what`` names it and the occasion."""
    logger.debug("%s: begins", printable(what), extra=provider.attributes() if provider else None)
    for listener in LISTENERS:
        listener.begins(printable(what), provider)
    try:
        yield
    finally:
        for listener in LISTENERS:
            listener.ends()
        logger.debug("%s: ends", printable(what))
