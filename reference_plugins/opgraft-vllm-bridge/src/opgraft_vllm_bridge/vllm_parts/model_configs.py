"""Configs of models, and checks of settings for models.

The modules are ``vllm.transformers_utils.config`` and ``vllm.model_executor.models.config``.
"""

from __future__ import annotations

import importlib
from typing import Any

from opgraft import init_logger
from opgraft.plugins.bridges import shortened

from opgraft_vllm_bridge.vllm_parts.config import current_settings, values_of

logger = init_logger("opgraft.vllm_bridge")


_CONFIG_REGISTRY: dict[str, Any] = {}
"""``model_type`` → the class of a plugin for configs of checkpoints."""


def give_configs_to_transformers() -> None:
    """Register the classes of plugins in transformers, which reads such checkpoints.

    Called after the function of a plugin, which may fill the registry by ``dict.__setitem__``. As
    in vLLM, each class takes the ``model_type`` of the entry.
    """
    if not _CONFIG_REGISTRY:
        return
    # Imported late, as most plugins register no config.
    transformers = importlib.import_module("transformers")
    for model_type, cls in _CONFIG_REGISTRY.items():
        cls.model_type = model_type
        transformers.AutoConfig.register(model_type, cls, exist_ok=True)


class VerifyAndUpdateConfig:
    """Checks of the settings for a model. A plugin overrides the methods, and raises errors."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Check the settings of the model."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Check all settings."""


MODELS_CONFIG_MAP: dict[str, type[VerifyAndUpdateConfig]] = {}
"""Architecture → the checks before a plugin's model of the architecture is made."""


def check_settings(architecture: str) -> None:
    """Let a plugin check the settings for a model. A change has no effect, and is reported."""
    checks = MODELS_CONFIG_MAP.get(architecture)
    if checks is None:
        return
    settings = current_settings()
    before = values_of(settings)
    if settings.model_config is not None:
        checks.verify_and_update_model_config(settings.model_config)
    checks.verify_and_update_config(settings)
    for name, value in values_of(settings).items():
        if value != before[name]:
            logger.warning(
                "the plugin of the model %r sets %s to %s, to no effect: the engine is made before "
                "its model. Give the setting yourself",
                architecture,
                name,
                shortened(repr(value)),
            )
