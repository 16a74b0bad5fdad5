"""Loggers with ``warning_once``, under the names in vLLM, and the output of opgraft's log."""

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
    """Log a message at the first call with these arguments."""

    def __call__(self, msg: str, *args: object, scope: str = "process") -> None: ...


class OnceLogger(logging.Logger):
    """A logger of ``init_logger``. The new attributes are on the instance."""

    debug_once: LogOnce
    info_once: LogOnce
    warning_once: LogOnce
    error_once: LogOnce


def init_logger(name: str) -> OnceLogger:
    """Return the logger of ``logging.getLogger`` with four new methods.

    ``debug_once``, ``info_once``, ``warning_once`` and ``error_once`` take the arguments of
    ``debug``, and log once per process for equal arguments. With ``scope``, vLLM chooses the ranks
    that log. opgraft ignores ``scope``: every process logs.
    """
    plain = logging.getLogger(name)
    for method, level in _LEVELS.items():
        setattr(plain, f"{method}_once", _once(plain, level))
    return cast(OnceLogger, plain)


# Cached, so that two modules with one logger share what has been said.
@functools.cache
def _once(plain: logging.Logger, level: int) -> Callable[..., None]:
    said: set[tuple[str, ...]] = set()

    def log(msg: str, *args: object, scope: str = "process") -> None:
        # Arguments need not be hashable.
        key = (msg, *map(repr, args))
        if key not in said:
            said.add(key)
            # The record shows the line of the caller.
            plain.log(level, msg, *args, stacklevel=2)

    return log


logger = init_logger("opgraft")
"""The logger of opgraft. ``OPGRAFT_LOG`` sets the level."""

_stderr = logging.StreamHandler()
_stderr.setFormatter(logging.Formatter("opgraft %(levelname)s: %(message)s"))


def set_level(level: str | None) -> None:
    """Log from ``level`` on. Log to stderr, unless the program has handlers.

    ``None`` leaves the level to the program.
    """
    # The handler of an earlier call must not count as one of the program.
    logger.removeHandler(_stderr)
    logger.setLevel(level.upper() if level else logging.NOTSET)
    if level and not logger.hasHandlers():
        logger.addHandler(_stderr)


@contextmanager
def silent() -> Iterator[None]:
    """Log nothing within the block. Afterwards the level of ``logging.disable`` is as before."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)


def write_json() -> None:
    """Write the log of all libraries to stderr as lines of JSON.

    A line has ``time``, ``level`` and ``logger``. If the record has ``fields``, the line has these.
    Otherwise the line has ``message`` and the attributes with a dot in the name. An exception adds
    ``traceback``.
    """
    logger.removeHandler(_stderr)
    _stderr.setFormatter(_Json())
    logging.getLogger().addHandler(_stderr)


def writes_json() -> bool:
    """Return True after a call of ``write_json``."""
    return isinstance(_stderr.formatter, _Json)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        created = datetime.fromtimestamp(record.created, timezone.utc)
        fields = getattr(record, "fields", None)
        if not fields:
            # opgraft's attributes have a dot, and those of logging have none.
            dotted = {name: value for name, value in vars(record).items() if "." in name}
            fields = {"message": record.getMessage(), **dotted}
        line = {
            "time": created.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        # A line of the log must not fail because of a value.
        return json.dumps(line, default=repr)
