"""The settings of logging: ``vllm.logger``.

Plugins extend the settings for their own loggers, and pass them to ``dictConfig``.
"""

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
"""The settings of vLLM without colours, and with standard error as the stream, as in opgraft."""
