"""Formatters of log lines: ``vllm.logging_utils``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_COLOURS: Mapping[str, str] = MappingProxyType(
    {"DEBUG": "37", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "35"}
)


class NewLineFormatter(logging.Formatter):
    """Writes a message's prefix before each of its lines. ``%(fileinfo)s`` is a file's name."""

    def __init__(self, fmt: Any = None, datefmt: Any = None, style: Any = "%") -> None:
        super().__init__(fmt, datefmt, style)

    def format(self, record: logging.LogRecord) -> str:
        record.fileinfo = record.filename
        text = super().format(record)
        if not record.message or "\n" not in text:
            return text
        prefix, _, _ = text.partition(record.message)
        return text.replace("\n", f"\r\n{prefix}")


class ColoredFormatter(NewLineFormatter):
    """Writes levels in colours, and times and places in grey."""

    def __init__(self, fmt: Any = None, datefmt: Any = None, style: Any = "%") -> None:
        for part in ("%(asctime)s", "[%(fileinfo)s:%(lineno)d]"):
            fmt = fmt and fmt.replace(part, f"\033[90m{part}\033[0m")
        super().__init__(fmt, datefmt, style)

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname
        record.levelname = f"\033[{_COLOURS.get(level, '0')}m{level}\033[0m"
        try:
            return super().format(record)
        finally:
            # Other handlers write the same record.
            record.levelname = level
