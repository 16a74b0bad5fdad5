"""Looking at what decides about the logs of everybody: the root logger, that of opgraft, and what all share."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

from opgraft.plugins.changes import Change, Value, attribute

_Held = list[tuple[Any, int | None]]
"""Handlers, each with its level."""


class Switches:
    """The switches of loggers, which ``logging.config`` turns off for all that it is not told of."""

    def read(self) -> list[logging.Logger]:
        known = list(logging.root.manager.loggerDict.values())
        return [log for log in known if isinstance(log, logging.Logger) and not log.disabled]

    def changes(
        self, before: list[logging.Logger], after: list[logging.Logger]
    ) -> Iterator[Change]:
        off = [log for log in before if log.disabled and log.name != "opgraft"]
        if off:
            yield Change(
                f"loggers of others, {off[0].name} first, to be disabled",
                partial(self._enable, off),
            )

    def _enable(self, loggers: list[logging.Logger]) -> None:
        for log in loggers:
            log.disabled = False


def values() -> Iterator[Value]:
    """Yield what decides for everybody whether a line is logged, where to, and by which class."""
    level = partial(getattr, logging.root.manager, "disable")
    yield Value(
        "the level that logging.disable drops", level, logging.disable, logging.getLevelName
    )
    yield Value(
        "the class of loggers",
        logging.getLoggerClass,
        logging.setLoggerClass,
        _name_of,
        operator.is_,
    )
    factory = logging.getLogRecordFactory, logging.setLogRecordFactory
    yield Value("the factory of log records", *factory, _name_of, operator.is_)
    for log, name in (
        (logging.getLogger(), "the root logger"),
        (logging.getLogger("opgraft"), "opgraft's logger"),
    ):
        yield Value(
            f"the level of {name}",
            partial(getattr, log, "level"),
            log.setLevel,
            logging.getLevelName,
        )
        yield Value(f"whether {name} is disabled", *attribute(log, "disabled"))
        yield Value(f"whether {name} passes lines on", *attribute(log, "propagate"))
        yield Value(
            f"the filters of {name}", partial(_filters, log), partial(_set_filters, log), _kinds
        )
        yield Value(
            f"the handlers of {name}",
            partial(_handlers, log),
            partial(_set_handlers, log),
            _handlers_in_words,
        )


def _name_of(kind: Any) -> str:
    return str(getattr(kind, "__name__", type(kind).__name__))


def _filters(log: logging.Logger) -> list[Any]:
    return [*log.filters]


def _set_filters(log: logging.Logger, filters: list[Any]) -> None:
    log.filters[:] = filters


def _kinds(items: list[Any]) -> str:
    return ", ".join(type(each).__name__ for each in items) or "none"


def _handlers(log: logging.Logger) -> _Held:
    return [
        (each, each.level if isinstance(each, logging.Handler) else None) for each in log.handlers
    ]


def _set_handlers(log: logging.Logger, held: _Held) -> None:
    log.handlers[:] = [handler for handler, _ in held]
    for handler, level in held:
        if level is not None:
            handler.setLevel(level)


def _handlers_in_words(held: _Held) -> str:
    return (
        ", ".join(
            f"{type(each).__name__} at {logging.getLevelName(level or 0)}" for each, level in held
        )
        or "none"
    )
