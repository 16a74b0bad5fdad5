"""Knowing whose code runs, for when it takes the process down."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from opgraft.decision import Provider
from opgraft.text import printable

BEGINS = "%s: begins"
ENDS = "%s: ends"

logger = logging.getLogger("opgraft.watching")


@contextmanager
def watched(what: str, provider: Provider | None) -> Iterator[None]:
    """Log at level DEBUG when the code of ``provider`` begins and ends; ``what`` names it and the occasion."""
    logger.debug(BEGINS, printable(what), extra=provider.attributes() if provider else None)
    try:
        yield
    finally:
        logger.debug(ENDS, printable(what))
