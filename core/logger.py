"""Logging: loggers with ``warning_once``, by the names that vLLM's plugins import, and who gets to see what."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Protocol, cast

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class LogOnce(Protocol):
    """Log a message, the first time that it comes with these arguments."""

    def __call__(self, msg: str, *args: object, scope: str = "process") -> None: ...


class OnceLogger(logging.Logger):
    """A logger as ``init_logger`` returns it. What this class adds to ``logging.Logger`` is there on the instance."""

    debug_once: LogOnce
    info_once: LogOnce
    warning_once: LogOnce
    error_once: LogOnce


def init_logger(name: str) -> OnceLogger:
    """Return the logger of that name with ``debug_once``, ``info_once``, ``warning_once`` and ``error_once``.

    It is the logger that ``logging.getLogger`` returns. The new methods take what ``debug`` and its like take. They log
    a message once per process for equal arguments, and accept ``scope``, by which vLLM says which ranks log:
    here every process logs for itself.
    """
    plain = logging.getLogger(name)
    for method, level in _LEVELS.items():
        setattr(plain, f"{method}_once", _once(plain, level))
    return cast(OnceLogger, plain)


@functools.cache
def _once(plain: logging.Logger, level: int) -> Callable[..., None]:
    said: set[tuple[str, ...]] = set()

    def log(msg: str, *args: object, scope: str = "process") -> None:
        key = (msg, *map(repr, args))
        if key not in said:
            said.add(key)
            plain.log(level, msg, *args, stacklevel=2)

    return log


logger = init_logger("opgraft")
"""The logger of opgraft, whose level ``OPGRAFT_LOG`` sets."""

_stderr = logging.StreamHandler()
_stderr.setFormatter(logging.Formatter("opgraft %(levelname)s: %(message)s"))


def set_level(level: str | None) -> None:
    """Log from ``level`` on, to stderr unless the program has handlers of its own; ``None``: as the program says."""
    logger.removeHandler(_stderr)
    logger.setLevel(level.upper() if level else logging.NOTSET)
    if level and not logger.hasHandlers():
        logger.addHandler(_stderr)


@contextmanager
def silent() -> Iterator[None]:
    """Log nothing within the block."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def write_json() -> None:
    """Write everything that is logged to stderr as lines of JSON, whoever logs it.

    Each has ``time``, ``level`` and ``logger``, and the record's ``fields`` if it has some, or else its ``message`` and
    its attributes with a dot in their names; an exception is its ``traceback``.
    """
    logger.removeHandler(_stderr)
    _stderr.setFormatter(_Json())
    logging.getLogger().addHandler(_stderr)


def writes_json() -> bool:
    """Return True after a call of ``write_json``."""
    return isinstance(_stderr.formatter, _Json)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(
            timespec="milliseconds"
        )
        told = {name: value for name, value in vars(record).items() if "." in name}
        fields = getattr(record, "fields", None) or {"message": record.getMessage(), **told}
        line = {"time": time, "level": record.levelname, "logger": record.name, **fields}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)
