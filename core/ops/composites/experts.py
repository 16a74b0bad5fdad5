"""Experts with the weights of all of them in two parameters, as the models of transformers have them."""

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


@CustomOp.register("experts")
class Experts(Composite):
    """Experts that the caller has chosen: ``Σ weight · down(act(gate(x)) · up(x))`` over those of a token
    (arXiv:1701.06538), by ``UnquantizedFusedMoEMethod``.

    ``graft`` puts it in the place of experts of transformers' models, with the parameters that they have. A kernel for
    them replaces ``UnquantizedFusedMoEMethod``: a replacement of ``transformers_fused_moe`` is not used there.

    Args:
        num_experts: in all.
        hidden_size: elements of a token.
        intermediate_size: elements between the two products.
        activation: as ``opgraft.functional.fused_experts`` has it.
        bias: whether both products have one, ``gate_up_proj_bias`` and ``down_proj_bias``.
        transposed: the parameters have their last two dimensions exchanged.
        act: ``act_fn``, for a model that has the activation as a layer. It is called where it has hooks.

    Shapes:
        hidden states ``[tokens, hidden_size]``, ids ``[tokens, top_k]`` and weights ``[tokens, top_k]`` to
        ``[tokens, hidden_size]``. Parameters ``gate_up_proj`` and ``down_proj`` are ``w13`` and ``w2`` of that form.
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
        rows = 2 * intermediate_size
        for name, *shape in (
            ("gate_up_proj", rows, hidden_size),
            ("down_proj", hidden_size, intermediate_size),
        ):
            sizes = reversed(shape) if transposed else shape
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, *sizes)))
            biases = nn.Parameter(torch.empty(num_experts, shape[0])) if bias else None
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
        # Read as an attribute: where a parametrization computes the weight, it is no parameter.
        weight: Tensor = getattr(self, name)
        return weight.mT if self.transposed else weight

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum what the experts ``top_k_index`` make of each token, by ``top_k_weights``.

        Raises:
            ValueError: as ``opgraft.functional.fused_experts``.
        """
        x = hidden_states.to(self.w2_weight.dtype)  # under autocast, norms return float32
        if self._activates_within():
            output: Tensor = self.quant_method.apply(self, x, top_k_weights, top_k_index)
        else:
            output = self._by_layers(x, top_k_weights, top_k_index)
        return output.to(hidden_states.dtype)

    def _by_layers(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Compute one expert after another, with calls of ``act_fn``."""
        rows, order, bounds = sorted_by_expert(x, ids, self.quant_method.moe.num_experts)
        outputs = [rows.new_zeros(bounds[0], rows.shape[1])]
        act: Any = self.act_fn
        for expert, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                gate, up = _linear(rows[begin:end], self.w13_weight, self.w13_bias, expert).chunk(
                    2, dim=-1
                )
                outputs.append(_linear(act(gate) * up, self.w2_weight, self.w2_bias, expert))
        return combined(torch.cat(outputs), order, bounds, weights)

    def idle(self) -> frozenset[str]:
        return frozenset(
            {"act_fn"} & self._modules.keys() if self._activates_within() else {"quant_method"}
        )

    def _activates_within(self) -> bool:
        """Decide whether the experts' kernel may do what the layer ``act_fn`` would."""
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


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return F.linear(x, weight[expert], None if bias is None else bias[expert])
