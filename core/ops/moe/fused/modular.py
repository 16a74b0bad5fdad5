"""Experts in three parts that can be replaced one by one: prepare, experts, finalize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.ops.checks import expect_same_dtype
from opgraft.ops.moe.fused import functional
from opgraft.ops.moe.fused.methods import FusedMoEMethodBase, SharedExperts, with_shared_experts
from opgraft.registry.signatures import called_with
from torch import Tensor, nn


@dataclass(frozen=True)
class PreparedTokens:
    """Tokens as experts take them.

    Attributes:
        rows: ``[rows, hidden_size]``, those of an expert one after another.
        bounds: where the rows of each expert begin, and where the last one's end.
        order: of each row, the pair of token and choice that it is for, counted through.
    """

    rows: Tensor
    bounds: list[int]
    order: Tensor


@PluggableClass.register("moe_prepare")
class MoEPrepare(PluggableClass):
    """Brings tokens to experts: sorts them here. Another quantizes them, or sends them to the ranks of the experts."""

    @called_with(by_position=("x", "topk_ids", "num_experts"))
    def __call__(self, x: Tensor, topk_ids: Tensor, num_experts: int) -> PreparedTokens:
        """Prepare tokens ``[tokens, hidden_size]`` for the experts ``topk_ids`` ``[tokens, topk]``, of so many."""
        rows, order, bounds = functional.sorted_by_expert(x, topk_ids, num_experts)
        return PreparedTokens(rows, bounds, order)


@PluggableClass.register("moe_experts")
class MoEExperts(PluggableClass):
    """Lets experts compute the tokens that are prepared for them: a product each for gate and up, and one for down."""

    @called_with(by_position=("layer", "prepared", "activation"))
    def __call__(self, layer: Any, prepared: PreparedTokens, activation: str) -> Tensor:
        """Return what the experts of ``layer`` make of each prepared row, ``[rows, hidden_size]``.

        Raises:
            ValueError: the weights have another dtype than the rows, as those of quantized methods have.
        """
        for name in ("w13_weight", "w2_weight"):
            expect_same_dtype("moe_experts", name, getattr(layer, name), "x", prepared.rows)
        biases = getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None)
        return functional.grouped_experts(
            prepared.rows, prepared.bounds, layer.w13_weight, layer.w2_weight, activation, *biases
        )


@PluggableClass.register("moe_finalize")
class MoEFinalize(PluggableClass):
    """Brings what experts made back to its tokens, and sums it by their weights."""

    @called_with(by_position=("outputs", "prepared", "topk_weights"))
    def __call__(self, outputs: Tensor, prepared: PreparedTokens, topk_weights: Tensor) -> Tensor:
        """Return ``[tokens, hidden_size]`` for outputs of prepared rows and weights ``[tokens, topk]``."""
        return functional.combined(outputs, prepared.order, prepared.bounds, topk_weights)


class FusedMoEModularKernel:
    """The three parts in turn.

    Args:
        prepare: brings tokens to experts; the active one if not given.
        experts: computes them, likewise.
        finalize: brings back what they made, likewise.
    """

    def __init__(
        self,
        prepare: MoEPrepare | None = None,
        experts: MoEExperts | None = None,
        finalize: MoEFinalize | None = None,
    ) -> None:
        self.prepare = prepare or MoEPrepare()
        self.experts = experts or MoEExperts()
        self.finalize = finalize or MoEFinalize()

    def __call__(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, moe: Any
    ) -> Tensor:
        """Return ``[tokens, hidden_size]``; arguments are those of ``FusedMoEMethodBase.apply``.

        Raises:
            ValueError: an id names no expert.
        """
        num_experts = layer.w13_weight.shape[0]
        functional.expect_ids("modular_fused_moe", topk_ids, num_experts)
        prepared = self.prepare(x, topk_ids, num_experts)
        outputs = self.experts(layer, prepared, moe.activation)
        return self.finalize(outputs, prepared, topk_weights)


@CustomOp.register("modular_fused_moe")
class FusedMoEModularMethod(FusedMoEMethodBase):
    """Computes with the weights of another method, by three parts that can be replaced one by one.

    Args:
        old_quant_method: holds the weights.
        moe_kernel: the parts; the active ones if not given.
    """

    def __init__(
        self, old_quant_method: FusedMoEMethodBase, moe_kernel: FusedMoEModularKernel | None = None
    ) -> None:
        super().__init__(old_quant_method.moe)
        self.old_quant_method = old_quant_method
        self.moe_kernel = moe_kernel or FusedMoEModularKernel()

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
        self.old_quant_method.create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.old_quant_method.process_weights_after_loading(layer)

    def expert_tensors(self, layer: nn.Module) -> Sequence[Tensor]:
        return self.old_quant_method.expert_tensors(layer)

    def forward_native(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: SharedExperts | None = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Compute as ``apply``."""
        output = self.moe_kernel(layer, x, topk_weights, topk_ids, self.moe)
        return with_shared_experts(output, x, shared_experts, shared_experts_input)
