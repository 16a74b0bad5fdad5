"""``vllm.envs``: the variables whose answer opgraft knows. Of others, opgraft heeds none."""

from __future__ import annotations

from opgraft.state import host_state

_config, _environment = host_state().settings().config, host_state().known_environment()

VLLM_COMPUTE_NANS_IN_LOGITS: bool = False
VLLM_CONFIGURE_LOGGING: bool = True
VLLM_LOGGING_CONFIG_PATH: str | None = None
VLLM_LOGGING_LEVEL: str = (_environment.log or "INFO").upper()
VLLM_PLUGINS: list[str] | None = None if _config.plugins is None else list(_config.plugins)
VLLM_USE_MODELSCOPE: bool = False
