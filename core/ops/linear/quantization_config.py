"""``QuantizationConfig`` chooses the weight method of each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.errors import QuantizationError
from torch import nn


class QuantizationConfig(PluggableClass, ABC):
    """The quantization of a model, an argument of each layer.

    Attributes:
        packed_modules_mapping: name of a merged layer → names of the merged layers, from the model.
        embeddings: names of the embeddings and heads to quantize. Other ones may stay plain.
    """

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}
        self.embeddings: frozenset[str] = frozenset()

    @abstractmethod
    def get_name(self) -> str:
        """Return the name of the quantization, such as ``"fp8"``."""

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the possible dtypes of activations."""

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the possible names of a file with this config, beside a checkpoint's weights."""
        return []

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Return the config for the settings of a checkpoint."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the weight method of a layer under construction; ``None`` for a plain weight.

        The method is a ``QuantizeMethodBase``, for a layer of experts a ``FusedMoEMethodBase``.

        Args:
            layer: has a class, and no weights yet.
            prefix: the layer's name in the checkpoint.
        """


def chosen_method(layer: nn.Module, quant_config: QuantizationConfig | None, prefix: str) -> Any:
    """Return the weight method of a layer by a config; ``None`` for a plain weight.

    A config of another package needs no base class: the method ``get_quant_method`` is enough.

    Args:
        layer: a layer under construction.
        quant_config: the layer's argument of that name.
        prefix: the layer's name in the checkpoint.

    Raises:
        QuantizationError: ``quant_config`` is no config.
    """
    if quant_config is None:
        return None
    # A class has the method, too, but no settings.
    if isinstance(quant_config, type) or not hasattr(quant_config, "get_quant_method"):
        raise QuantizationError(
            f"{type(layer).__name__}(quant_config={quant_config!r}): a layer takes an instance of "
            "a QuantizationConfig, such as opgraft.quantization.quantization_named('int8')()"
        )
    return quant_config.get_quant_method(layer, prefix)
