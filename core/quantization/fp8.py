"""Weights in 8-bit floating point, made while a plain checkpoint is loaded: a scale for each output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.ops.linear.methods import QuantizeMethodBase
from opgraft.ops.quantized_linear import functional as forms
from opgraft.ops.quantized_linear.quantizers import quantize_fp8
from opgraft.quantization.integers import OnlineConfig
from opgraft.quantization.online import OnlineLinearMethod
from torch import Tensor


@PluggableClass.register("fp8")
class Fp8Config(OnlineConfig):
    """Weights in ``float8_e4m3fn`` with a scale for each output; inputs are quantized to the same, row by row."""

    def get_name(self) -> str:
        return "fp8"

    def linear_method(self) -> QuantizeMethodBase:
        method: QuantizeMethodBase = Fp8OnlineLinearMethod()
        return method


@PluggableClass.register("fp8_online_linear_method")
class Fp8OnlineLinearMethod(OnlineLinearMethod):
    """Holds ``weight`` in fp8 and ``weight_scale`` ``[out_features, 1]``."""

    def quantize(self, weight: Tensor) -> Mapping[str, Tensor | None]:
        codes, scale = quantize_fp8(weight)
        return {"weight": codes, "weight_scale": scale}

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return forms.fp8_linear(x, layer.weight, layer.weight_scale, None, bias)
