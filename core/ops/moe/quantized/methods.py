"""The weight method of experts with quantized weights, whatever format a checkpoint has them in."""

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


class ExpertWeights(ABC):
    """A format of experts' weights: what a checkpoint has of them, and how that becomes the layer's codes."""

    @abstractmethod
    def create(self, layer: Any, sizes: tuple[int, int, int], params_dtype: torch.dtype) -> None:
        """Make what a checkpoint is loaded to.

        Args:
            layer: the ``FusedMoE``.
            sizes: experts of this rank, elements of a token, and between the products on this rank.
            params_dtype: of what is not quantized.
        """

    @abstractmethod
    def finish(self, layer: Any) -> None:
        """Give ``layer`` the parameters ``w13_weight``, ``w13_scales``, ``w13_offsets``, and those of ``w2``, in the
        storage of ``quantized_experts``, once everything is loaded."""


@CustomOp.register("quantized_fused_moe")
class QuantizedFusedMoEMethod(FusedMoEMethodBase):
    """Weights of experts in 4 or 8 bits: ``w13_weight``, ``w13_scales``, ``w13_offsets``, and the same of ``w2``.

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
        self.weights.create(
            layer, (num_experts, hidden_size, intermediate_size_per_partition), params_dtype
        )
        if self.moe.has_bias:
            rows = {"w13_bias": 2 * intermediate_size_per_partition, "w2_bias": hidden_size}
            shapes = {name: (num_experts, count) for name, count in rows.items()}
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
        """Compute as ``apply``; errors are those of ``opgraft.functional.quantized_experts``."""
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
