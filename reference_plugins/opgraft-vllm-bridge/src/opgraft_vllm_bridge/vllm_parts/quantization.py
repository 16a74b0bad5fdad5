"""Quantizations of plugins: ``vllm.model_executor.layers.quantization``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from opgraft import PluggableClass, init_logger
from opgraft.errors import ConflictError
from opgraft.kernels import QuantizationConfig as _QuantizationConfig
from opgraft.kernels import quantization_named
from opgraft.plugins.bridges import shortened

Config = TypeVar("Config", bound=type)

logger = init_logger("opgraft.vllm_bridge")

QuantizationMethods = str
"""The name of a quantization. Plugins may register any name."""


class QuantizationConfig(_QuantizationConfig):
    """opgraft's class, with vLLM's helpers for a checkpoint's settings."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute level of a GPU. opgraft does not ask for it."""
        return 0

    @staticmethod
    def get_from_keys(config: Mapping[str, Any], keys: Sequence[str]) -> Any:
        """Return the value of the first key in the settings.

        Raises:
            ValueError: the settings have none of the keys.
        """
        for key in keys:
            if key in config:
                return config[key]
        raise ValueError(
            f"the checkpoint's quantization has none of the settings {', '.join(keys)}"
        )

    @staticmethod
    def get_from_keys_or(config: Mapping[str, Any], keys: Sequence[str], default: Any) -> Any:
        """Return the value of the first key in the settings, or the default."""
        for key in keys:
            if key in config:
                return config[key]
        return default


def register_weight_loader_v2_supported_method(cls: Config) -> Config:
    """Return the class unchanged. opgraft loads parameters by their attributes, not by classes."""
    return cls


def register_quantization_config(quantization: str) -> Callable[[Config], Config]:
    """Return a decorator to register a config under the name in checkpoints.

    If the name has a config already, the former config stays, and a warning is logged.
    """

    def register(cls: Config) -> Config:
        try:
            PluggableClass.register(quantization)(cls)
        except ConflictError as error:
            logger.warning(
                "the quantization %r of a plugin is left out, as there is one: %s",
                shortened(quantization),
                error,
            )
        return cls

    return register


def get_quantization_config(quantization: str) -> type[_QuantizationConfig]:
    """Return the config of that name.

    Raises:
        QuantizationError: no config has this name.
    """
    return quantization_named(quantization)
