"""Weight methods of experts: each holds the weights in one form, and computes with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.on_triton import on_triton
from opgraft.ops.weights import WeightMethod, set_weight_attrs
from torch import Tensor, nn

__all__ = ["UnquantizedFusedMoEMethod"]

TRITON = on_triton("opgraft.ops.moe.fused.triton")

SharedExperts = Callable[[Tensor], Tensor]
"""The experts that every token visits, ``[tokens, hidden_size]`` to the same shape."""


@dataclass(frozen=True)
class FusedMoEConfig:
    """The sizes of a layer's experts.

    Attributes:
        num_experts: the experts of all ranks.
        experts_per_token: the number of experts of each token.
        hidden_dim: elements of a token.
        intermediate_size_per_partition: elements between the two products, of this rank.
        activation: as in ``opgraft.functional.fused_experts``.
        has_bias: both products have a bias.
        in_dtype: the dtype of activations; torch's default dtype if not given.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size_per_partition: int
    activation: str = "silu"
    has_bias: bool = False
    in_dtype: torch.dtype | None = None


class FusedMoEMethodBase(WeightMethod, CustomOp, ABC):
    """The weight method of a layer of experts, the layer's ``quant_method``.

    The layer holds the weights.

    Args:
        moe: the sizes of the layer.
    """

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__()
        self.moe = moe

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Create the parameters of ``layer``, empty, in the form of the checkpoint.

        Args:
            layer: gets the parameters.
            num_experts: of this rank.
            hidden_size: elements of a token.
            intermediate_size_per_partition: of this rank.
            params_dtype: the dtype of plain parameters.
            **extra_weight_attrs: attributes of every parameter, such as ``weight_loader``.
        """

    def apply(
        self,
        layer: Any,
        x: Tensor | None = None,
        topk_weights: Tensor | None = None,
        topk_ids: Tensor | None = None,
        shared_experts: SharedExperts | None = None,
        shared_experts_input: Tensor | None = None,
    ) -> Any:
        """Return the weighted sum of the chosen experts' outputs, plus that of shared experts.

        ``apply(function)`` is ``torch.nn.Module.apply``.

        Args:
            layer: has the weights.
            x: ``[tokens, hidden_size]``.
            topk_weights: ``[tokens, topk]``.
            topk_ids: ``[tokens, topk]``, int32 or int64; -1 for an expert of another rank.
            shared_experts: visited by every token.
            shared_experts_input: ``[tokens, hidden_size]``; ``x`` if not given.
        """
        # A model's ``apply(function)`` reaches every module below the model, this one too.
        if x is None:
            return super().apply(layer)
        return self(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)

    def apply_monolithic(
        self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        """Choose experts by ``router_logits`` ``[tokens, num_experts]``, and apply them.

        ``input_ids`` is not read.
        """
        weights, ids = layer.select_experts(x, router_logits)
        output: Tensor = self.apply(layer, x, weights, ids)
        return output

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Change the loaded weights to the layout of ``apply``. Called once."""

    def expert_tensors(self, layer: nn.Module) -> Sequence[Tensor]:
        """Return the tensors of the loaded experts of ``layer``, each ``[experts, …]``.

        A balancer writes experts from other ranks to these tensors. By default the tensors are the
        parameters ``w13_…`` and ``w2_…``. A method with other tensors overrides this one.
        """
        return [
            weight
            for name, weight in layer.named_parameters(recurse=False)
            if name.startswith(("w13_", "w2_"))
        ]


@CustomOp.register("unquantized_fused_moe")
class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """Holds plain weights, and computes ``fused_experts``.

    The parameters are ``w13_weight`` ``[experts, 2 · intermediate, hidden]`` and ``w2_weight``
    ``[experts, hidden, intermediate]``. With biases there are ``w13_bias``
    ``[experts, 2 · intermediate]`` and ``w2_bias`` ``[experts, hidden]``.
    """

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows = 2 * intermediate_size_per_partition
        shapes: dict[str, tuple[int, ...]] = {
            "w13_weight": (num_experts, rows, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        if self.moe.has_bias:
            shapes["w13_bias"] = (num_experts, rows)
            shapes["w2_bias"] = (num_experts, hidden_size)
        create_parameters(layer, shapes, params_dtype, extra_weight_attrs)

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
            ValueError: as ``opgraft.functional.fused_experts``.
        """
        output: Tensor = functional.fused_experts(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            self.moe.activation,
            getattr(layer, "w13_bias", None),
            getattr(layer, "w2_bias", None),
        )
        return with_shared_experts(output, x, shared_experts, shared_experts_input)


def create_parameters(
    layer: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    attributes: Mapping[str, Any],
) -> None:
    """Give ``layer`` an empty parameter of each shape, with the attributes."""
    for name, shape in shapes.items():
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        set_weight_attrs(parameter, attributes)
        layer.register_parameter(name, parameter)


def with_shared_experts(
    output: Tensor,
    x: Tensor,
    shared_experts: SharedExperts | None,
    shared_experts_input: Tensor | None,
) -> Tensor:
    """Add the output of shared experts for their input, ``x`` if not given."""
    if shared_experts is None:
        return output
    if shared_experts_input is not None:
        x = shared_experts_input
    return output + shared_experts(x)
