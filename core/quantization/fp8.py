"""Weights in 8-bit floating point, from plain checkpoints or checkpoints in fp8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.errors import QuantizationError
from opgraft.ops.linear.methods import LinearMethodBase, QuantizeMethodBase
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.quantized import functional
from opgraft.ops.linear.quantized.quantizers import quantize_fp8
from opgraft.quantization.checkpoint import (
    CheckpointConfig,
    Scales,
    create_parameter,
    not_converted,
    replace,
    setting,
)
from opgraft.quantization.integers import OnlineConfig
from opgraft.quantization.online import OnlineLinearMethod
from torch import Tensor

_FORMATS = ("e4m3", "e4m3fn", "float8_e4m3fn")
"""Names of the dtype of weights."""


@PluggableClass.register("fp8")
class Fp8Config(OnlineConfig):
    """Weights in ``float8_e4m3fn`` with a scale for each output.

    Inputs are quantized to the same dtype, row by row. ``from_config`` makes
    ``Fp8CheckpointConfig`` from the settings of a checkpoint with fp8 weights.
    """

    def get_name(self) -> str:
        return "fp8"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make the config from a checkpoint's settings; empty for a plain checkpoint.

        Raises:
            QuantizationError: a setting cannot be read.
        """
        if "quant_method" in config:
            return Fp8CheckpointConfig.from_config(config)
        return super().from_config(config)

    def linear_method(self) -> OnlineLinearMethod:
        method: OnlineLinearMethod = Fp8OnlineLinearMethod()
        return method


@PluggableClass.register("fp8_online_linear_method")
class Fp8OnlineLinearMethod(OnlineLinearMethod):
    """Holds ``weight`` in fp8 and ``weight_scale`` ``[out_features, 1]``."""

    def quantize(self, weight: Tensor) -> Mapping[str, Tensor | None]:
        codes, scale = quantize_fp8(weight)
        return {"weight": codes, "weight_scale": scale}

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.fp8_linear(x, layer.weight, layer.weight_scale, None, bias)


class Fp8CheckpointConfig(CheckpointConfig):
    """Weights in fp8 from checkpoints, with a scale for each layer, or for each block of a weight.

    Args:
        static: inputs are divided by a scale of the checkpoint, and not by a scale for each row.
        block: outputs and inputs of a block.
        ignore: patterns of plain layers in the checkpoint.
    """

    def __init__(
        self, static: bool, block: tuple[int, int] | None = None, ignore: Sequence[str] = ()
    ) -> None:
        super().__init__(ignore)
        self.static = static
        self.block = block

    def get_name(self) -> str:
        return "fp8"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make the config from the checkpoint's settings.

        These are ``activation_scheme``, ``weight_block_size``, ``fmt``, ``scale_fmt`` and the list
        of plain layers.

        Raises:
            QuantizationError: a setting cannot be read.
        """
        setting("fp8", config, "fmt", _FORMATS, "e4m3")
        # Scales that are powers of two ("ue8m0") are numbers of float32, too.
        setting("fp8", config, "scale_fmt", ("float", "float32", "ue8m0"), "float")
        scheme = setting("fp8", config, "activation_scheme", ("dynamic", "static"), "dynamic")
        static = scheme == "static"
        block = block_shape("fp8", config.get("weight_block_size"))
        if static and block is not None:
            raise QuantizationError(
                "the checkpoint's quantization fp8 has blocks and static scales of inputs: no op "
                "does"
            )
        # Tools have two names for the list.
        ignore = [*not_converted("fp8", config, "ignored_layers"), *not_converted("fp8", config)]
        return cls(static, block, ignore)

    def linear_method(self, prefix: str) -> QuantizeMethodBase:
        name = "weight_scale" if self.block is None else "weight_scale_inv"
        method: QuantizeMethodBase = Fp8LinearMethod(Scales(self.block), self.static, name)
        return method


def block_shape(name: str, value: object) -> tuple[int, int] | None:
    """Return the outputs and inputs of a block, from a checkpoint.

    Raises:
        QuantizationError: the value is not two positive numbers.
    """
    if value is None:
        return None

    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise QuantizationError(
            f"the checkpoint's quantization {name} has blocks of {value!r:.80}, expected two "
            "numbers"
        )
    outputs, inputs = sizes
    return outputs, inputs


@PluggableClass.register("fp8_linear_method")
class Fp8LinearMethod(LinearMethodBase):
    """Holds ``weight`` in fp8, ``weight_scale``, and a static ``input_scale`` if there is one.

    A merged layer has one ``input_scale``, the largest of the layers inside.

    Args:
        scales: the form of the scales of a weight.
        static: inputs are divided by ``input_scale``.
        scale_name: the name of the scales in the checkpoint.
    """

    def __init__(self, scales: Scales, static: bool, scale_name: str = "weight_scale") -> None:
        self.scales = scales
        self.static = static
        self.scale_name = scale_name

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        create_parameter(
            layer,
            "weight",
            shape,
            torch.float8_e4m3fn,
            input_dim=1,
            output_dim=0,
            **extra_weight_attrs,
        )
        sizes = (input_size_per_partition, output_partition_sizes)
        self.scales.create(layer, self.scale_name, *sizes, **extra_weight_attrs)
        if self.static:
            Scales(None).create(layer, "input_scale", *sizes, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Give each output the scale of the layer, so that a merged layer keeps all scales."""
        scales = getattr(layer, self.scale_name).data
        by_output = self.scales.by_output(scales, layer.output_partition_sizes)
        replace(layer, [self.scale_name], {"weight_scale": by_output})
        if self.static:
            # A merged layer has one input, so that one scale serves all parts.
            largest = layer.input_scale.max().reshape(1)
            replace(layer, ["input_scale"], {"input_scale": largest})

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        block = self.scales.block
        if block == (1, -1):
            block = None
        input_scale = layer.input_scale if self.static else None
        return functional.fp8_linear(x, layer.weight, layer.weight_scale, input_scale, bias, block)
