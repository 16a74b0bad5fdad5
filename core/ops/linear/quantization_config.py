"""``QuantizationConfig``, which chooses the weight method of each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.errors import QuantizationError
from torch import nn


class QuantizationConfig(PluggableClass, ABC):
    """A quantization of a model, which layers are constructed with.

    Attributes:
        packed_modules_mapping: name of a merged layer → names of the layers that it stands for, as the model says.
        embeddings: names of embeddings and heads that are to be quantized, too; the others may stay plain.
    """

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}
        self.embeddings: frozenset[str] = frozenset()

    @abstractmethod
    def get_name(self) -> str:
        """Return the name of the quantization, such as ``"fp8"``."""

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that a model may compute in."""

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the names of files beside a checkpoint's weights that may hold this config."""
        return []

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make it of the settings that a checkpoint has."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the weight method of a layer that is being constructed, ``None`` for a plain weight.

        It is a ``QuantizeMethodBase``, for a layer of experts a ``FusedMoEMethodBase``.

        Args:
            layer: its class tells what it needs; it has no weights yet.
            prefix: its name in the checkpoint.
        """


def chosen_method(layer: nn.Module, quant_config: QuantizationConfig | None, prefix: str) -> Any:
    """Return the weight method that a config chooses for a layer, ``None`` for a plain weight.

    A config of another package needs no base class: the method ``get_quant_method`` is enough.

    Args:
        layer: a layer that is being constructed.
        quant_config: the argument of that name, as the layer was given it.
        prefix: the layer's name in the checkpoint.

    Raises:
        QuantizationError: ``quant_config`` is no config.
    """
    if quant_config is None:
        return None
    if isinstance(quant_config, type) or not hasattr(quant_config, "get_quant_method"):
        raise QuantizationError(
            f"{type(layer).__name__}(quant_config={quant_config!r}): a layer takes an instance of a "
            "QuantizationConfig, such as opgraft.quantization.quantization_named('int8')()"
        )
    return quant_config.get_quant_method(layer, prefix)
