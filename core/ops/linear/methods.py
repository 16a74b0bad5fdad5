"""Ways for a layer to hold its weight and compute with it: the seam at which quantization enters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.ops.linear import functional as forms
from opgraft.ops.weights import set_weight_attrs
from torch import Tensor, nn
from torch.nn import functional as F

Kernel = Callable[..., Tensor]
"""A function such as the form ``linear``."""


class QuantizeMethodBase(PluggableClass, ABC):
    """A way to hold weights, of which a layer has one as ``quant_method``. It keeps its state in the layer."""

    @abstractmethod
    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        """Make the parameters of ``layer``, empty, in the form in which a checkpoint has them."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Compute with the weights of ``layer``."""

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """Look up rows ``[..., embedding_dim]`` for ids; a method that embeddings may have overrides this."""
        raise NotImplementedError(f"{type(self).__name__} has no embedding")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Bring the weights into the layout that ``apply`` prefers, once they are loaded. Called once."""


class LinearMethodBase(QuantizeMethodBase):
    """The weight method of linear layers."""

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the parameters of ``layer``, empty, in the form in which a checkpoint has them.

        Args:
            layer: gets the parameters. Their attributes ``output_dim`` and ``input_dim`` name the dimensions that are
                cut, see ``opgraft.ops.linear.sharding``.
            input_size_per_partition: of this rank.
            output_partition_sizes: of this rank, one for each layer that a merged layer stands for.
            input_size: of all ranks.
            output_size: of all ranks.
            params_dtype: of what is not quantized.
            **extra_weight_attrs: go on every parameter; ``weight_loader`` among them.
        """

    @abstractmethod
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map ``[..., input_size_per_partition]`` to ``[..., output_size_per_partition]``."""


class UnquantizedLinearMethod(LinearMethodBase):
    """The weight is a parameter ``[out_features, in_features]``."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        create_plain_weight(
            layer, sum(output_partition_sizes), input_size_per_partition, params_dtype, extra_weight_attrs
        )

    def apply(
        self,
        layer: Any,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str = "none",
        residual: Tensor | None = None,
        kernel: Kernel = forms.linear,
    ) -> Tensor:
        """Map ``x``, with what follows the map; by ``kernel``, where that suits the weight as it is."""
        return kernel(x, layer.weight, bias, activation, residual)

    def holds_weight(self, layer: nn.Module) -> bool:
        """Say whether the weight is the layer's own, and is not computed for a call."""
        return "weight" in layer._parameters

    def release_weights(self, layer: Any) -> None:
        """Make the weight an ordinary parameter again, whatever loading has made of it."""


class UnquantizedEmbeddingMethod(QuantizeMethodBase):
    """The weight is a parameter ``[num_embeddings, embedding_dim]``, a row for each id."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        create_plain_weight(
            layer, sum(output_partition_sizes), input_size_per_partition, params_dtype, extra_weight_attrs
        )

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map hidden states to logits."""
        return forms.linear(x, layer.weight, bias)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return F.embedding(input_, layer.weight)


def create_plain_weight(
    layer: nn.Module, rows: int, columns: int, dtype: torch.dtype, attributes: dict[str, Any]
) -> None:
    """Give ``layer`` an empty ``weight`` of shape ``[rows, columns]``, cut along both dimensions."""
    weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
    set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **attributes})
    layer.register_parameter("weight", weight)
