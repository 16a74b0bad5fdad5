"""``vllm.model_executor.layers.quantization``: configs of quantizations that plugins bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from opgraft import PluggableClass
from opgraft.kernels import QuantizationConfig as _QuantizationConfig
from opgraft.kernels import quantization_named

Config = TypeVar("Config", bound=type)

QuantizationMethods = str
"""The name of a quantization, of which plugins may register any."""


class QuantizationConfig(_QuantizationConfig):
    """opgraft's, with the helpers by which plugins of vLLM read a checkpoint's settings."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the compute level of GPUs that it needs, which nothing asks here."""
        return 0

    @staticmethod
    def get_from_keys(config: Mapping[str, Any], keys: Sequence[str]) -> Any:
        """Return the value of the first key that is there.

        Raises:
            ValueError: none is.
        """
        for key in keys:
            if key in config:
                return config[key]
        raise ValueError(
            f"the checkpoint's quantization has none of the settings {', '.join(keys)}"
        )

    @staticmethod
    def get_from_keys_or(config: Mapping[str, Any], keys: Sequence[str], default: Any) -> Any:
        """Return the value of the first key that is there, or the default."""
        return next((config[key] for key in keys if key in config), default)


def register_weight_loader_v2_supported_method(cls: Config) -> Config:
    """Return the class: a parameter tells by its attributes how it is loaded, whichever class makes it."""
    return cls


def register_quantization_config(quantization: str) -> Callable[[Config], Config]:
    """Register a config under a name, by which checkpoints and users ask for it; a decorator."""
    return PluggableClass.register(quantization)


def get_quantization_config(quantization: str) -> type[_QuantizationConfig]:
    """Return the config of that name.

    Raises:
        QuantizationError: there is none.
    """
    return quantization_named(quantization)
