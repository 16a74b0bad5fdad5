"""``vllm.logger``: the settings of logging that plugins extend for loggers of their own, and give to ``dictConfig``."""

from __future__ import annotations

from typing import Any

from opgraft.plugins.bridges import log_level

_LEVEL = log_level()

DEFAULT_LOGGING_CONFIG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "vllm": {
            "format": "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s",
            "datefmt": "%m-%d %H:%M:%S",
        }
    },
    "handlers": {
        "vllm": {
            "class": "logging.StreamHandler",
            "formatter": "vllm",
            "level": _LEVEL,
            "stream": "ext://sys.stderr",
        }
    },
    "loggers": {"vllm": {"handlers": ["vllm"], "level": _LEVEL, "propagate": False}},
}
"""As vLLM's, but for the stream, which is that of opgraft's messages, and for colours."""
