"""Ways for a linear layer to hold its weight and compute with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Kernel = Callable[..., Tensor]
"""A function such as the form ``linear``."""


class LinearMethodBase(ABC):
    """The weight method of linear layers, which they have as ``quant_method``; it keeps its state in the layer."""

    @abstractmethod
    def apply(self, layer: Any, x: Tensor, activation: str, residual: Tensor | None, kernel: Kernel) -> Tensor:
        """Apply the layer's map to ``x``, with what follows it; by ``kernel``, where that suits the weight as it is."""

    @abstractmethod
    def holds_weight(self, layer: nn.Module) -> bool:
        """Say whether the weight is the layer's own, and is not computed for a call."""

    @abstractmethod
    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring the weight into the layout that ``apply`` prefers, once it is known."""

    @abstractmethod
    def release_weights(self, layer: Any) -> None:
        """Make the weight an ordinary parameter again."""


class UnquantizedLinearMethod(LinearMethodBase):
    """The weight is a parameter ``[out_features, in_features]``."""

    def apply(self, layer: Any, x: Tensor, activation: str, residual: Tensor | None, kernel: Kernel) -> Tensor:
        return kernel(x, layer.weight, layer.bias, activation, residual)

    def holds_weight(self, layer: nn.Module) -> bool:
        return "weight" in layer._parameters

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weight as it is."""

    def release_weights(self, layer: Any) -> None:
        """Leave the weight as it is."""
