"""bfloat16 weights in 12 bits, made while a plain checkpoint is loaded, without loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from opgraft.binding.functional import Functional
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.ops.linear.lossless import functional
from opgraft.ops.linear.lossless.storage import from_12_bits, to_12_bits
from opgraft.ops.linear.methods import QuantizeMethodBase
from opgraft.ops.moe.fused import FusedMoE
from opgraft.ops.moe.fused.methods import FusedMoEMethodBase
from opgraft.quantization.integers import OnlineConfig
from opgraft.quantization.online import OnlineLinearMethod
from torch import Tensor, nn


@PluggableClass.register("lossless12")
class Lossless12Config(OnlineConfig):
    """Weights of 12 bits with the same numbers as in bfloat16. Experts stay plain."""

    def get_name(self) -> str:
        return "lossless12"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def linear_method(self) -> OnlineLinearMethod:
        method: OnlineLinearMethod = Lossless12LinearMethod()
        return method

    def get_quant_method(
        self, layer: nn.Module, prefix: str
    ) -> QuantizeMethodBase | FusedMoEMethodBase | None:
        if isinstance(layer, FusedMoE):
            return None
        return super().get_quant_method(layer, prefix)


@PluggableClass.register("lossless12_linear_method")
class Lossless12LinearMethod(OnlineLinearMethod):
    """Holds the tensors of a ``LosslessWeight``: ``codes`` as ``weight``, and the other three."""

    def quantize(self, weight: Tensor) -> Mapping[str, Tensor | None]:
        codes, exponents, places, units = to_12_bits(weight)
        return {"weight": codes, "exponents": exponents, "places": places, "units": units}

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.lossless_linear(
            x, layer.weight, layer.exponents, layer.places, layer.units, bias
        )

    def form_of(self, layer: Any) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]]:
        tensors = (layer.weight, layer.exponents, layer.places, layer.units)
        return functional.lossless_linear, tensors

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Look up rows. A tied head has the same codes as the embedding."""
        size = layer.embedding_dim
        rows = from_12_bits(
            layer.weight, layer.exponents, layer.places, layer.units, size, input_.flatten()
        )
        return rows.reshape(*input_.shape, size)
