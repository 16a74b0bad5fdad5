"""Weights of 4 and 8 bits, made while a plain checkpoint is loaded."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opgraft.binding.functional import Functional
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.errors import QuantizationError
from opgraft.ops.embedding.vocab import VocabParallelEmbedding
from opgraft.ops.linear.methods import QuantizeMethodBase
from opgraft.ops.linear.parallel import LinearBase
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.quantized import functional
from opgraft.ops.linear.quantized.quantizers import quantize_int4, quantize_int8
from opgraft.ops.moe.fused import FusedMoE
from opgraft.ops.moe.fused.methods import FusedMoEMethodBase
from opgraft.ops.moe.quantized.methods import QuantizedFusedMoEMethod
from opgraft.quantization.experts import OnlineExperts
from opgraft.quantization.online import LooksUpCodes, OnlineLinearMethod
from opgraft.quantization.patterns import Patterns
from torch import Tensor, nn


class OnlineConfig(QuantizationConfig):
    """A quantization of linear layers and experts, and of embeddings that the settings name.

    Args:
        ignore: patterns of plain layers, see ``opgraft.quantization.patterns``.
    """

    def __init__(self, ignore: Sequence[str] = ()) -> None:
        super().__init__()
        self.ignore = Patterns(ignore)

    @abstractmethod
    def linear_method(self) -> OnlineLinearMethod:
        """Make the weight method of a linear layer."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Make the config from the constructor's arguments; ``quant_method`` is skipped.

        Raises:
            QuantizationError: there is no such argument, or an argument of another type.
        """
        given = {name: value for name, value in config.items() if name != "quant_method"}
        known = inspect.signature(cls.__init__).parameters
        unknown = [f"{name!r:.80}" for name in given if name not in known]
        if unknown:
            raise QuantizationError(
                f"{cls.__qualname__} has no setting {', '.join(unknown)}, which the checkpoint's "
                f"config sets: there are {', '.join(list(known)[1:])}"
            )
        return cls(**given)

    def get_quant_method(
        self, layer: nn.Module, prefix: str
    ) -> QuantizeMethodBase | FusedMoEMethodBase | None:
        is_named = prefix in self.embeddings
        # No checkpoint has the rows of padding.
        is_embedding = isinstance(layer, VocabParallelEmbedding) and layer.is_unpadded
        if not isinstance(layer, (LinearBase, FusedMoE)) and not (is_named and is_embedding):
            return None
        if self.ignore.match(prefix, self.packed_modules_mapping):
            return None
        method = self.linear_method()
        if isinstance(layer, FusedMoE):
            return QuantizedFusedMoEMethod(layer.moe_config, OnlineExperts(method))
        return method


@PluggableClass.register("int8")
class Int8Config(OnlineConfig):
    """Weights of 8 bits with a scale for each output; inputs stay unchanged."""

    def get_name(self) -> str:
        return "int8"

    def linear_method(self) -> OnlineLinearMethod:
        method: OnlineLinearMethod = Int8LinearMethod()
        return method


@PluggableClass.register("int8_dynamic")
class Int8DynamicConfig(OnlineConfig):
    """Weights of 8 bits with a scale for each output; inputs are quantized to 8 bits row by row."""

    def get_name(self) -> str:
        return "int8_dynamic"

    def linear_method(self) -> OnlineLinearMethod:
        method: OnlineLinearMethod = Int8DynamicLinearMethod()
        return method


@PluggableClass.register("int4")
class Int4Config(OnlineConfig):
    """Weights of 4 bits with a scale, and an offset unless ``symmetric``, for each group of inputs.

    Args:
        ignore: patterns of plain layers.
        group_size: inputs of a group, a divisor of the inputs of every layer on every rank.
        symmetric: have no offsets.

    Raises:
        QuantizationError: ``group_size`` is no positive integer.
    """

    def __init__(
        self, ignore: Sequence[str] = (), group_size: int = 32, symmetric: bool = False
    ) -> None:
        super().__init__(ignore)
        if type(group_size) is not int or group_size < 1:
            raise QuantizationError(
                f"int4: group_size is {group_size!r:.80}, expected a positive number of inputs"
            )
        self.group_size = group_size
        self.symmetric = symmetric

    def get_name(self) -> str:
        return "int4"

    def linear_method(self) -> OnlineLinearMethod:
        method: OnlineLinearMethod = Int4LinearMethod(self.group_size, self.symmetric)
        return method


@PluggableClass.register("int8_linear_method")
class Int8LinearMethod(LooksUpCodes, OnlineLinearMethod):
    """Holds ``weight`` in ``int8`` and ``scales`` ``[out_features, 1]``."""

    def quantize(self, weight: Tensor) -> Mapping[str, Tensor | None]:
        codes, scales = quantize_int8(weight)
        return {"weight": codes, "scales": scales}

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.quantized_linear(x, layer.weight, layer.scales, None, bias)

    def form_of(self, layer: Any) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]]:
        return functional.quantized_linear, (layer.weight, layer.scales, None)


@PluggableClass.register("int8_dynamic_linear_method")
class Int8DynamicLinearMethod(Int8LinearMethod):
    """Holds the storage of ``Int8LinearMethod``, and quantizes inputs too."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.int8_dynamic_linear(x, layer.weight, layer.scales, bias)

    def form_of(self, layer: Any) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]]:
        return functional.int8_dynamic_linear, (layer.weight, layer.scales)


@PluggableClass.register("int4_linear_method")
class Int4LinearMethod(LooksUpCodes, OnlineLinearMethod):
    """Holds ``weight`` in ``uint8``, ``scales`` and ``offsets`` ``[out_features, groups]``."""

    def __init__(self, group_size: int, symmetric: bool) -> None:
        self.group_size = group_size
        self.symmetric = symmetric

    def expect_fits(self, name: str, in_features: int) -> None:
        if self.group_size < 1 or in_features % self.group_size:
            raise QuantizationError(
                f"{name} has {in_features} inputs on this rank, which groups of {self.group_size} "
                "do not divide: leave the layer out by quantization.skip, or take another method "
                "or fewer ranks; where the checkpoint's own quantization_config says so, another "
                "group_size, or its list 'ignore'"
            )

    def quantize(self, weight: Tensor) -> Mapping[str, Tensor | None]:
        codes, scales, offsets = quantize_int4(weight, self.group_size, self.symmetric)
        return {"weight": codes, "scales": scales, "offsets": offsets}

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.quantized_linear(x, layer.weight, layer.scales, layer.offsets, bias)

    def form_of(self, layer: Any) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]]:
        return functional.quantized_linear, (layer.weight, layer.scales, layer.offsets)
