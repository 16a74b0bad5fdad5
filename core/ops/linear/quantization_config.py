"""``QuantizationConfig``, which chooses the weight method of each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
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
