"""Linear layers that compute each row alike, however many there are."""

from __future__ import annotations

from typing import Any

from opgraft.ops.linear.methods import QuantizeMethodBase, UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from torch import Tensor, nn


class InvariantMethod(QuantizeMethodBase):
    """Computes over a packed weight, a single row as two: from two rows on, each has the same bits whatever the others.

    Args:
        method: of the layer, whose weight is packed.
    """

    def __init__(self, method: UnquantizedLinearMethod | UnquantizedEmbeddingMethod) -> None:
        self.method = method

    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        self.method.create_weights(layer, *weight_args, **extra_weight_attrs)

    def apply(
        self, layer: Any, x: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Map ``[..., in_features]``, with what follows the map."""
        if residual is not None:
            options["residual"] = residual if x.numel() > x.shape[-1] else _twice(residual)
        if x.numel() > x.shape[-1]:
            return self.method.apply(layer, x, bias, **options)
        return self.method.apply(layer, _twice(x), bias, **options)[:1].reshape(*x.shape[:-1], -1)


def _twice(row: Tensor) -> Tensor:
    return row.reshape(1, -1).repeat(2, 1)


def compute_rows_alike(layer: Any) -> str | None:
    """Have a layer with a weight method compute each row alike, or say why it cannot."""
    method = layer.quant_method
    if not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return f"its weight method is {type(method).__name__}"
    layer.hold_packed()
    if layer._packed is None:
        return "its weight cannot be packed here"
    layer.quant_method = InvariantMethod(method)
    return None
