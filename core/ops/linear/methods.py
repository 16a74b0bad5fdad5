"""Weight methods: each holds the weight of a layer in one form, and computes with the weight.

A quantization is another weight method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from opgraft.binding.custom_op import CustomOp
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
    """The weight method of a layer, the layer's ``quant_method``. The layer holds the state."""

    adapters: CustomOp | None = None
    """The op that adds adapters to the results, if the rows of the present call have some."""

    @property
    def own(self) -> QuantizeMethodBase:
        """The method without adapters."""
        return self

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any
    ) -> None:
        """Create the parameters of ``layer``, empty, in the form of the checkpoint."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Compute with the weights of ``layer``."""

    def form_of(
        self, layer: Any
    ) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]] | None:
        """Return the only form that ``apply`` calls, with the arguments between input and bias.

        ``None`` if ``apply`` does more. A caller may then bind the layer to the kernel of the form
        once, and skip ``apply``. A class that overrides ``apply`` overrides this method too.
        """
        return None

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """Return the rows ``[..., embedding_dim]`` of ids. Methods for embeddings override this."""
        raise NotImplementedError(f"{type(self).__name__} has no embedding")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Change the loaded weights to the layout of ``apply``. Called once."""


@runtime_checkable
class HasWeightMethod(Protocol):
    """A layer with a weight method."""

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
        """Create the parameters of ``layer``, empty, in the form of the checkpoint.

        Args:
            layer: gets the parameters. The attributes ``output_dim`` and ``input_dim`` of a
                parameter name the dimensions to cut; see ``opgraft.ops.linear.sharding``.
            input_size_per_partition: of this rank.
            output_partition_sizes: of this rank, one for each layer in a merged layer.
            input_size: of all ranks.
            output_size: of all ranks.
            params_dtype: the dtype of plain parameters.
            **extra_weight_attrs: attributes of every parameter, such as ``weight_loader``.
        """

    @abstractmethod
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map ``[..., input_size_per_partition]`` to ``[..., output_size_per_partition]``."""


class _PlainWeightMethod(QuantizeMethodBase):
    """Holds the weight as one plain parameter, or packed."""

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
        rows = sum(output_partition_sizes)
        columns = input_size_per_partition
        create_plain_weight(layer, rows, columns, params_dtype, extra_weight_attrs)

    def remark(self, owner: Any) -> str:
        return "over a packed weight, by oneDNN" if owner._packed is not None else ""


@PluggableClass.register("unquantized_linear_method")
class UnquantizedLinearMethod(_PlainWeightMethod, LinearMethodBase):
    """Holds the weight of a ``Linear`` or a ``PackableLayer``.

    The weight is a parameter ``[out_features, in_features]``, or packed.
    """

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
        """Return ``linear`` of ``x`` by ``kernel``, or by oneDNN if the weight is packed."""
        packed = layer._packed
        if packed is None:
            return kernel(x, layer.weight, bias, activation, residual)
        return packed_linear.linear_packed_only(x, packed, bias, activation, residual)

    def form_of(
        self, layer: Any
    ) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]] | None:
        return _form_over_plain_weight(layer)

    def holds_weight(self, layer: Any) -> bool:
        """Return True if the layer holds the weight. A parametrization computes one per call."""
        return layer._packed is not None or "weight" in layer._parameters

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight if that pays on this platform and the weight is not trained."""
        if _gains_by_packing(layer):
            layer.hold_packed()


@PluggableClass.register("unquantized_embedding_method")
class UnquantizedEmbeddingMethod(_PlainWeightMethod):
    """Holds the weight of an embedding, ``[num_embeddings, embedding_dim]``, a row for each id."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states."""
        packed = layer._packed
        if packed is None:
            return functional.linear(x, layer.weight, bias)
        return packed_linear.linear_packed_only(x, packed, bias, "none", None)

    def form_of(
        self, layer: Any
    ) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]] | None:
        return _form_over_plain_weight(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight of an output layer if that pays and no embedding shares the weight."""
        if not layer.looks_up and not layer.tied and _gains_by_packing(layer):
            layer.hold_packed()

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return F.embedding(input_, layer.weight)


def _form_over_plain_weight(
    layer: Any,
) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]] | None:
    # A packed weight is no argument of the form.
    if layer._packed is not None:
        return None
    return functional.linear, (layer.weight,)


def form_called(
    layer: Any, *, adds_adapters: bool = False
) -> tuple[Functional[..., Tensor], tuple[Tensor | None, ...]] | None:
    """Return ``form_of`` of a layer's weight method, or ``None`` if that may be wrong.

    A class that overrides ``apply`` alone inherits a ``form_of`` for another computation. A form
    has no adapters: ask in each call, since the layer may have adapters in one call and none in the
    next.

    Args:
        layer: a layer with a weight method.
        adds_adapters: the caller adds the adapters of the present call to the result, see
            ``adapter_bounds``.
    """
    if layer.quant_method.adapters is not None and not adds_adapters:
        return None
    method: QuantizeMethodBase = layer.quant_method.own
    if definer(type(method), "apply") is not definer(type(method), "form_of"):
        return None
    return method.form_of(layer)


def forms_of(layer: Any) -> tuple[Functional[..., Tensor], ...]:
    """Return the form of a layer's weight method, for ``PluggableLayer.forms``."""
    called = form_called(layer, adds_adapters=True)
    return (called[0],) if called else ()


def _gains_by_packing(layer: Any) -> bool:
    """Return True if a packed weight pays and the kernel of ``linear`` is oneDNN."""
    weight = layer._parameters.get("weight")
    if weight is None or weight.requires_grad or not isinstance(layer, PackableLayer):
        return False
    if obstacle(weight) is not None or not packed_linear.pays_packed(weight):
        return False
    if packed_linear.missing() is not None:
        return False

    # Packing would pass over the kernel of a plugin.
    winner = binding_of(functional.linear).kernel.winner
    return winner.functional("linear") is packed_linear.linear


def create_plain_weight(
    layer: nn.Module, rows: int, columns: int, dtype: torch.dtype, attributes: dict[str, Any]
) -> None:
    """Give ``layer`` an empty ``weight``, ``[rows, columns]``, cut along both dimensions."""
    weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
    set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **attributes})
    layer.register_parameter("weight", weight)
