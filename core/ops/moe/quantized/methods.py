"""The weight method of quantized experts, for every format of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.moe.fused.methods import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    SharedExperts,
    create_parameters,
    with_shared_experts,
)
from torch import Tensor, nn

__all__ = ["QuantizedFusedMoEMethod"]


class ExpertWeights(ABC):
    """The format of experts in a checkpoint, and the way from there to the layer's codes."""

    @abstractmethod
    def create(self, layer: Any, sizes: tuple[int, int, int], params_dtype: torch.dtype) -> None:
        """Create the parameters to load a checkpoint into.

        Args:
            layer: the ``FusedMoE``.
            sizes: the experts of this rank, the elements of a token, and the elements between the
                two products on this rank.
            params_dtype: the dtype of plain parameters.
        """

    @abstractmethod
    def finish(self, layer: Any) -> None:
        """Give ``layer`` the parameters of ``quantized_experts``, after everything was loaded.

        The names are ``w13_weight``, ``w13_scales`` and ``w13_offsets``, and the same for ``w2``.
        """


@CustomOp.register("quantized_fused_moe")
class QuantizedFusedMoEMethod(FusedMoEMethodBase):
    """Holds experts in 4 or 8 bits, and computes ``quantized_experts``.

    The parameters are ``w13_weight``, ``w13_scales`` and ``w13_offsets``, and the same for ``w2``.

    Args:
        moe: the sizes of the layer.
        weights: the format of the checkpoint.
    """

    def __init__(self, moe: FusedMoEConfig, weights: ExpertWeights) -> None:
        super().__init__(moe)
        self.weights = weights

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        sizes = (num_experts, hidden_size, intermediate_size_per_partition)
        self.weights.create(layer, sizes, params_dtype)
        if self.moe.has_bias:
            # Biases are plain in every format.
            shapes = {
                "w13_bias": (num_experts, 2 * intermediate_size_per_partition),
                "w2_bias": (num_experts, hidden_size),
            }
            create_parameters(layer, shapes, params_dtype, extra_weight_attrs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.weights.finish(layer)

    @calls_functional
    def forward_native(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: SharedExperts | None = None,
        shared_experts_input: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> Tensor:
        """Return the result of ``apply``.

        Raises:
            ValueError: as ``opgraft.functional.quantized_experts``.
        """
        output: Tensor = functional.quantized_experts(
            x,
            layer.w13_weight,
            layer.w13_scales,
            layer.w2_weight,
            layer.w2_scales,
            topk_weights,
            topk_ids,
            self.moe.activation,
            layer.w13_offsets,
            layer.w2_offsets,
            getattr(layer, "w13_bias", None),
            getattr(layer, "w2_bias", None),
        )
        return with_shared_experts(output, x, shared_experts, shared_experts_input)
