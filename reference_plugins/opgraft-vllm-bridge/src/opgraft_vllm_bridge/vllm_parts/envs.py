"""Environment variables: ``vllm.envs``, as far as opgraft has an answer."""

from __future__ import annotations

from typing import Any

from opgraft.plugins.bridges import current_config, log_level

VLLM_COMPUTE_NANS_IN_LOGITS: bool = False
VLLM_CONFIGURE_LOGGING: bool = True
VLLM_LOGGING_CONFIG_PATH: str | None = None
VLLM_USE_MODELSCOPE: bool = False


def __getattr__(name: str) -> Any:
    """Return a variable whose answer depends on opgraft's settings.

    Raises:
        AttributeError: opgraft has no such variable.
    """
    if name == "VLLM_LOGGING_LEVEL":
        return log_level()
    if name == "VLLM_PLUGINS":
        plugins = current_config().plugins
        return None if plugins is None else list(plugins)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
