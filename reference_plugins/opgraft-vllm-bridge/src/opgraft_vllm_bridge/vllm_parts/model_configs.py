"""Configs of models: ``vllm.transformers_utils.config`` and ``vllm.model_executor.models.config``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from typing import Any

from opgraft import init_logger
from opgraft.plugins.bridges import shortened

from opgraft_vllm_bridge.vllm_parts.config import current_settings, values_of

logger = init_logger("opgraft.vllm_bridge")


class _Configs(MutableMapping[str, type]):
    """``model_type`` → the class of a plugin for configs of checkpoints.

    transformers reads such checkpoints, so each class is registered there.
    """

    def __init__(self) -> None:
        self._classes: dict[str, type] = {}

    def __getitem__(self, model_type: str) -> type:
        return self._classes[model_type]

    def __setitem__(self, model_type: str, cls: type) -> None:
        # Imported late, as most plugins register no config.
        transformers = importlib.import_module("transformers")
        transformers.AutoConfig.register(model_type, cls, exist_ok=True)
        self._classes[model_type] = cls

    def __delitem__(self, model_type: str) -> None:
        raise TypeError(f"the config for {model_type!r:.80} stays: transformers forgets no class")

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


_CONFIG_REGISTRY = _Configs()


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
    """Let a plugin check the settings for a model. Its changes have no effect, and are reported."""
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
