"""Experts with all weights in two parameters, as in transformers' models."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.ops.composites.composite import Composite, epilogue_of, is_observed, may_stand_for
from opgraft.ops.moe.fused.functional import combined, sorted_by_expert
from opgraft.ops.moe.fused.methods import FusedMoEConfig, UnquantizedFusedMoEMethod
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Experts"]


@CustomOp.register("experts")
class Experts(Composite):
    """The sum ``Σ weight · down(act(gate(x)) · up(x))`` over the experts of each token.

    Source: arXiv:1701.06538. The caller chooses the experts, and ``UnquantizedFusedMoEMethod``
    computes. ``graft`` replaces experts of transformers' models by this layer, with the same
    parameters. A kernel for the layer replaces ``UnquantizedFusedMoEMethod``; a replacement of
    ``transformers_fused_moe`` is not used.

    Args:
        num_experts: the number of experts.
        hidden_size: elements of a token.
        intermediate_size: elements between the two products.
        activation: as for ``opgraft.functional.fused_experts``.
        bias: both products have a bias, ``gate_up_proj_bias`` and ``down_proj_bias``.
        transposed: the last two dimensions of the parameters are exchanged.
        act: ``act_fn``, for a model with the activation as a layer. A layer with hooks is called.

    Shapes:
        hidden states ``[tokens, hidden_size]``, ids ``[tokens, top_k]`` and weights
        ``[tokens, top_k]`` to ``[tokens, hidden_size]``. The parameters ``gate_up_proj`` and
        ``down_proj`` are ``w13`` and ``w2`` of ``opgraft.functional.fused_experts``.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        transposed: bool = False,
        act: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.transposed = transposed
        products = {
            "gate_up_proj": (2 * intermediate_size, hidden_size),
            "down_proj": (hidden_size, intermediate_size),
        }
        for name, (rows, columns) in products.items():
            shape = (columns, rows) if transposed else (rows, columns)
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, *shape)))
            biases = nn.Parameter(torch.empty(num_experts, rows)) if bias else None
            self.register_parameter(f"{name}_bias", biases)

        if act is not None:
            self.add_module("act_fn", act)
        moe = FusedMoEConfig(num_experts, 0, hidden_size, intermediate_size, activation, bias)
        self.quant_method = UnquantizedFusedMoEMethod(moe)

    @property
    def w13_weight(self) -> Tensor:
        """The rows of gate and up, ``[experts, 2 · intermediate_size, hidden_size]``."""
        return self._weight("gate_up_proj")

    @property
    def w2_weight(self) -> Tensor:
        """The rows of down, ``[experts, hidden_size, intermediate_size]``."""
        return self._weight("down_proj")

    @property
    def w13_bias(self) -> Tensor | None:
        """The bias of gate and up, ``[experts, 2 · intermediate_size]``."""
        return self._bias("gate_up_proj_bias")

    @property
    def w2_bias(self) -> Tensor | None:
        """The bias of down, ``[experts, hidden_size]``."""
        return self._bias("down_proj_bias")

    def _bias(self, name: str) -> Tensor | None:
        bias: Tensor | None = getattr(self, name)
        return bias

    def _weight(self, name: str) -> Tensor:
        # Read as an attribute: a weight that a parametrization computes is no parameter.
        weight: Tensor = getattr(self, name)
        return weight.mT if self.transposed else weight

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum of the experts ``top_k_index`` of each token, by ``top_k_weights``.

        Raises:
            ValueError: as ``opgraft.functional.fused_experts``.
        """
        # Under autocast, norms return float32.
        x = hidden_states.to(self.w2_weight.dtype)
        if self._activates_within():
            output: Tensor = self.quant_method.apply(self, x, top_k_weights, top_k_index)
        else:
            output = self._by_layers(x, top_k_weights, top_k_index)
        return output.to(hidden_states.dtype)

    def _by_layers(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Compute one expert after another, with calls of the layer ``act_fn``."""
        rows, order, bounds = sorted_by_expert(x, ids, self.quant_method.moe.num_experts)
        outputs = [rows.new_zeros(bounds[0], rows.shape[1])]
        act: Any = self.act_fn
        for expert, (begin, end) in enumerate(pairwise(bounds)):
            if begin == end:
                continue
            both = _expert_linear(rows[begin:end], self.w13_weight, self.w13_bias, expert)
            gate, up = both.chunk(2, dim=-1)
            gated = act(gate) * up
            outputs.append(_expert_linear(gated, self.w2_weight, self.w2_bias, expert))
        return combined(torch.cat(outputs), order, bounds, weights)

    def idle(self) -> frozenset[str]:
        if not self._activates_within():
            return frozenset({"quant_method"})
        return frozenset({"act_fn"} & self._modules.keys())

    def _activates_within(self) -> bool:
        """Return True if the experts' kernel may stand for the layer ``act_fn``."""
        act = self._modules.get("act_fn")
        if act is None:
            return True
        if is_observed(act) or epilogue_of(act) != self.quant_method.moe.activation:
            return False
        allowed: bool = self.chosen(may_stand_for, self.quant_method, act)
        return allowed

    def extra_repr(self) -> str:
        moe = self.quant_method.moe
        sizes = f"{moe.num_experts}, {moe.hidden_dim}, {moe.intermediate_size_per_partition}"
        return f"{sizes}, activation={moe.activation!r}, transposed={self.transposed}"


def _expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    own_bias = None if bias is None else bias[expert]
    return F.linear(x, weight[expert], own_bias)
