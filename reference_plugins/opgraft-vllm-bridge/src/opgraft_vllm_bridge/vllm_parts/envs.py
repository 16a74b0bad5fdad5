"""``vllm.envs``: the variables whose answer opgraft knows. Of others, opgraft heeds none."""

from __future__ import annotations

from typing import Any

from opgraft.state import host_state

VLLM_COMPUTE_NANS_IN_LOGITS: bool = False
VLLM_CONFIGURE_LOGGING: bool = True
VLLM_LOGGING_CONFIG_PATH: str | None = None
VLLM_USE_MODELSCOPE: bool = False


def __getattr__(name: str) -> Any:
    """Return what holds while a plugin imports the module, which may be another setting for each.

    Raises:
        AttributeError: opgraft has no such variable.
    """
    if name == "VLLM_LOGGING_LEVEL":
        return (host_state().known_environment().log or "INFO").upper()
    if name == "VLLM_PLUGINS":
        plugins = host_state().settings().config.plugins
        return None if plugins is None else list(plugins)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
