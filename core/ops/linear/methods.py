"""Ways for a layer to hold its weight and compute with it: the seam at which quantization enters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from opgraft.binding.functional import Functional, binding_of
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.ops.linear import functional
from opgraft.ops.linear import packed as packed_linear
from opgraft.ops.linear.packed import PackableLayer, obstacle
from opgraft.ops.weights import set_weight_attrs
from opgraft.registry.op_classes import definer
from torch import Tensor, nn
from torch.nn import functional as F

Kernel = Callable[..., Tensor]
"""A function such as the form ``linear``."""


class QuantizeMethodBase(PluggableClass, ABC):
    """A way to hold weights, of which a layer has one as ``quant_method``. It keeps its state in the layer."""

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any
    ) -> None:
        """Make the parameters of ``layer``, empty, in the form in which a checkpoint has them."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Compute with the weights of ``layer``."""

    def form_of(
        self, layer: Any
    ) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]] | None:
        """Return the form that ``apply`` calls, and what it gives between input and bias; ``None`` if it does more.

        For those who bind a layer once to the kernel of that form. A class that overrides ``apply`` overrides this too.
        """
        return None

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """Look up rows ``[..., embedding_dim]`` for ids; a method that embeddings may have overrides this."""
        raise NotImplementedError(f"{type(self).__name__} has no embedding")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Bring the weights into the layout that ``apply`` prefers, once they are loaded. Called once."""


@runtime_checkable
class HasWeightMethod(Protocol):
    """A layer whose weight is held and applied by a weight method."""

    quant_method: QuantizeMethodBase


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


class _PlainWeight(QuantizeMethodBase):
    """A way to hold the weight as one plain parameter."""

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
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        create_plain_weight(layer, rows, columns, params_dtype, extra_weight_attrs)

    def remark(self, owner: Any) -> str:
        return "over a packed weight, by oneDNN" if owner._packed is not None else ""


@PluggableClass.register("unquantized_linear_method")
class UnquantizedLinearMethod(_PlainWeight, LinearMethodBase):
    """The weight is a parameter ``[out_features, in_features]``, or packed; of a ``Linear`` or a ``PackableLayer``."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str = "none",
        residual: Tensor | None = None,
        kernel: Kernel = functional.linear,
    ) -> Tensor:
        """Map ``x``, with what follows the map; by ``kernel``, unless the weight is packed."""
        packed = layer._packed
        if packed is None:
            return kernel(x, layer.weight, bias, activation, residual)
        return packed_linear.linear_packed_only(x, packed, bias, activation, residual)

    def form_of(
        self, layer: Any
    ) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]] | None:
        return (functional.linear, (layer.weight,)) if layer._packed is None else None

    def holds_weight(self, layer: Any) -> bool:
        """Say whether the weight is the layer's own, and is not computed for a call."""
        return layer._packed is not None or "weight" in layer._parameters

    def process_weights_after_loading(self, layer: Any) -> None:
        """Hold the weight packed only, where that pays on this platform and nobody trains it."""
        if _gains(layer):
            layer.hold_packed()


@PluggableClass.register("unquantized_embedding_method")
class UnquantizedEmbeddingMethod(_PlainWeight):
    """The weight is a parameter ``[num_embeddings, embedding_dim]``, a row for each id."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map hidden states to logits."""
        packed = layer._packed
        if packed is None:
            return functional.linear(x, layer.weight, bias)
        return packed_linear.linear_packed_only(x, packed, bias, "none", None)

    def form_of(
        self, layer: Any
    ) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]] | None:
        return (functional.linear, (layer.weight,)) if layer._packed is None else None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Hold the weight of an output layer packed only, where that pays here and no embedding has it too."""
        if not layer.looks_up and not layer.tied and _gains(layer):
            layer.hold_packed()

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return F.embedding(input_, layer.weight)


def form_called(layer: Any) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]] | None:
    """Return what the weight method of a layer says by ``form_of``, where it is true.

    A class that overrides only ``apply`` computes something else than the form that it inherits.
    """
    method = layer.quant_method
    if definer(type(method), "apply") is not definer(type(method), "form_of"):
        return None
    called: tuple[Functional[..., Tensor], tuple[Tensor | None, ...]] | None = method.form_of(layer)
    return called


def forms_of(layer: Any) -> tuple[Functional[..., Tensor], ...]:
    """Return the form that the weight method of a layer calls, for ``PluggableLayer.forms``."""
    called = form_called(layer)
    return (called[0],) if called else ()


def _gains(layer: Any) -> bool:
    """Tell whether calls of a layer gain from a packed weight: where the form ``linear`` would run oneDNN, too."""
    weight = layer._parameters.get("weight")
    if weight is None or weight.requires_grad or not isinstance(layer, PackableLayer):
        return False
    if (
        obstacle(weight) is not None
        or not packed_linear.pays_packed(weight)
        or packed_linear.missing() is not None
    ):
        return False
    return binding_of(functional.linear).kernel.winner.functional("linear") is packed_linear.linear


def create_plain_weight(
    layer: nn.Module, rows: int, columns: int, dtype: torch.dtype, attributes: dict[str, Any]
) -> None:
    """Give ``layer`` an empty ``weight`` of shape ``[rows, columns]``, cut along both dimensions."""
    weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
    set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **attributes})
    layer.register_parameter("weight", weight)
