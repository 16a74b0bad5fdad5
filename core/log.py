"""What opgraft logs, and to whom: the logger ``opgraft``, whose level ``OPGRAFT_LOG`` sets."""

from __future__ import annotations

import logging

logger = logging.getLogger("opgraft")

_stderr = logging.StreamHandler()
_stderr.setFormatter(logging.Formatter("opgraft %(levelname)s: %(message)s"))


def set_level(level: str | None) -> None:
    """Log from ``level`` on, to stderr unless the program has handlers of its own; ``None``: as the program says."""
    logger.removeHandler(_stderr)
    logger.setLevel(level.upper() if level else logging.NOTSET)
    if level and not logger.hasHandlers():
        logger.addHandler(_stderr)
