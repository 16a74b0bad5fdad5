"""Experts in three parts: prepare, experts, finalize. A plugin may replace each part alone."""

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

__all__ = ["FusedMoEModularMethod"]


@dataclass(frozen=True)
class PreparedTokens:
    """Tokens sorted by expert.

    Attributes:
        rows: ``[rows, hidden_size]``, sorted by expert.
        bounds: the first row of each expert, then the number of all rows.
        order: for each row, its pair of token and choice as ``token · topk + choice``.
    """

    rows: Tensor
    bounds: list[int]
    order: Tensor


@PluggableClass.register("moe_prepare")
class MoEPrepare(PluggableClass):
    """Sorts tokens by expert. A replacement may quantize them, or send them to other ranks."""

    @called_with(by_position=("x", "topk_ids", "num_experts"))
    def __call__(self, x: Tensor, topk_ids: Tensor, num_experts: int) -> PreparedTokens:
        """Prepare tokens ``[tokens, hidden_size]`` for experts ``topk_ids`` ``[tokens, topk]``."""
        rows, order, bounds = functional.sorted_by_expert(x, topk_ids, num_experts)
        return PreparedTokens(rows, bounds, order)


@PluggableClass.register("moe_experts")
class MoEExperts(PluggableClass):
    """Computes the experts on prepared tokens: gate and up, the activation, then down."""

    @called_with(by_position=("layer", "prepared", "activation"))
    def __call__(self, layer: Any, prepared: PreparedTokens, activation: str) -> Tensor:
        """Return the output of each prepared row, ``[rows, hidden_size]``.

        Raises:
            ValueError: the weights have another dtype than the rows, such as quantized weights.
        """
        rows = prepared.rows
        for name in ("w13_weight", "w2_weight"):
            expect_same_dtype("moe_experts", name, getattr(layer, name), "x", rows)
        return functional.grouped_experts(
            rows,
            prepared.bounds,
            layer.w13_weight,
            layer.w2_weight,
            activation,
            getattr(layer, "w13_bias", None),
            getattr(layer, "w2_bias", None),
        )


@PluggableClass.register("moe_finalize")
class MoEFinalize(PluggableClass):
    """Sums the outputs of each token's experts by their weights, in the order of tokens."""

    @called_with(by_position=("outputs", "prepared", "topk_weights"))
    def __call__(self, outputs: Tensor, prepared: PreparedTokens, topk_weights: Tensor) -> Tensor:
        """Return the sums ``[tokens, hidden_size]``.

        Args:
            outputs: the outputs of the prepared rows.
            prepared: the rows with their order.
            topk_weights: ``[tokens, topk]``.
        """
        return functional.combined(outputs, prepared.order, prepared.bounds, topk_weights)


class FusedMoEModularKernel:
    """Runs the three parts. A part that is not given is the active one.

    Args:
        prepare: brings tokens to experts.
        experts: computes the outputs of experts.
        finalize: brings outputs back to tokens.
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
        """Return ``[tokens, hidden_size]``. The arguments are as in ``FusedMoEMethodBase.apply``.

        Raises:
            ValueError: an id names no expert.
        """
        num_experts = layer.w13_weight.shape[0]
        # Checked here, as each part may be the part of a plugin.
        functional.expect_ids("modular_fused_moe", topk_ids, num_experts)
        prepared = self.prepare(x, topk_ids, num_experts)
        outputs = self.experts(layer, prepared, moe.activation)
        return self.finalize(outputs, prepared, topk_weights)


@CustomOp.register("modular_fused_moe")
class FusedMoEModularMethod(FusedMoEMethodBase):
    """Computes with the weights of another method, by :class:`FusedMoEModularKernel`.

    Args:
        old_quant_method: holds the weights.
        moe_kernel: the three parts; the active ones if not given.
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
        self.old_quant_method.create_weights(
            layer,
            num_experts,
            hidden_size,
            intermediate_size_per_partition,
            params_dtype,
            **extra_weight_attrs,
        )

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
        """Return the result of ``apply``."""
        output = self.moe_kernel(layer, x, topk_weights, topk_ids, self.moe)
        return with_shared_experts(output, x, shared_experts, shared_experts_input)
