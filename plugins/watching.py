"""Knowing whose code runs, for when it takes the process down."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from opgraft.text import printable

BEGINS = "%s: begins"
ENDS = "%s: ends"

logger = logging.getLogger("opgraft")


@contextmanager
def watched(what: str) -> Iterator[None]:
    """Log at level DEBUG when a plugin's code begins and ends; ``what`` names the plugin and the occasion."""
    logger.debug(BEGINS, printable(what))
    try:
        yield
    finally:
        logger.debug(ENDS, printable(what))
