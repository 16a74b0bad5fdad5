"""Quantize while loading: a layer quantizes and releases each complete plain weight."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opgraft.errors import QuantizationError
from opgraft.ops.linear.methods import LinearMethodBase, QuantizeMethodBase
from opgraft.ops.linear.quantized.storage import dequantize, out_of_tiles
from opgraft.ops.weights import LoadedTensor, set_weight_attrs
from torch import Tensor, nn


class LooksUpCodes(QuantizeMethodBase):
    """Storage for ``quantized_linear`` that serves embeddings too.

    A tied head has the same codes as the embedding.
    """

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Look up rows, as plain numbers of the layer's dtype."""
        ids = input_.flatten()
        size = layer.embedding_dim
        offsets: Tensor | None = getattr(layer, "offsets", None)
        # A kernel may have packed the weight into tiles.
        if layer.weight.dim() == 3:
            found = out_of_tiles(layer.weight, layer.scales, offsets, size, ids)
        else:
            offsets_of_rows = None if offsets is None else offsets[ids]
            found = (layer.weight[ids], layer.scales[ids], offsets_of_rows)
        rows = dequantize(*found, size)
        return rows.to(layer.params_dtype).reshape(*input_.shape, size)


class OnlineLinearMethod(LinearMethodBase):
    """A weight method that quantizes the complete plain weight of a checkpoint.

    Before that, the layer's ``weight`` is on ``meta`` and takes no memory.
    """

    @abstractmethod
    def quantize(self, weight: Tensor) -> Mapping[str, Tensor | None]:
        """Return tensors by name that replace the plain weight ``[out_features, in_features]``."""

    def expect_fits(self, name: str, in_features: int) -> None:
        """Raise ``QuantizationError`` if a layer with so many inputs cannot be quantized."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make a ``weight`` without memory, with the loader of a plain weight.

        Raises:
            QuantizationError: the method cannot quantize the layer.
        """
        self.expect_fits(layer.prefix or type(layer).__name__, input_size_per_partition)
        shape = (sum(output_partition_sizes), input_size_per_partition)
        loader = extra_weight_attrs.pop("weight_loader")
        parts = len(output_partition_sizes)
        loading = _QuantizingLoader(self, layer, loader, parts, torch.get_default_device())
        create_deferred_weight(layer, shape, params_dtype, loading, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check for a complete weight.

        Raises:
            QuantizationError: parts of the weight are missing.
        """
        if layer.weight.is_meta:
            raise QuantizationError(
                f"{layer.prefix}: its weight, which is quantized as it is loaded, was not loaded, "
                "or not all of it: load it by the parameter's weight_loader"
            )


class _QuantizingLoader:
    """Loads parts of a plain weight, and quantizes the weight after the last part.

    Args:
        method: quantizes the weight.
        layer: the layer, which gets the quantized weight.
        loader: the layer's own loader of a plain weight.
        parts: the number of layers inside a merged layer.
        device: the device of the plain weight.
    """

    def __init__(
        self,
        method: OnlineLinearMethod,
        layer: nn.Module,
        loader: Callable[..., None],
        parts: int,
        device: torch.device,
    ) -> None:
        self.method = method
        self.layer = layer
        self.loader = loader
        self.parts = parts
        self.device = device
        self.loaded: set[object] = set()
        self.plain: nn.Parameter | None = None

    def __call__(self, param: nn.Parameter, loaded_weight: LoadedTensor, *shard: object) -> None:
        if self.plain is None:
            empty = torch.empty_like(param, device=self.device)
            self.plain = nn.Parameter(empty, requires_grad=False)
            set_weight_attrs(self.plain, {"input_dim": 1, "output_dim": 0})
        self.loader(self.plain, loaded_weight, *shard)
        # One tensor may fill several parts: (0, 1).
        loaded_parts: list[object] = []
        for part in shard:
            loaded_parts += part if isinstance(part, tuple) else (part,)
        self.loaded.update(loaded_parts)
        is_whole = not loaded_parts or None in loaded_parts
        if not is_whole and len(self.loaded) < self.parts:
            return
        plain = self.plain
        # The plain weight is released on return.
        self.plain = None
        put(self.layer, self.method.quantize(plain.data))


def create_deferred_weight(
    layer: nn.Module,
    shape: tuple[int, int],
    dtype: torch.dtype,
    loading: Callable[..., None],
    **attributes: Any,
) -> None:
    """Give ``layer`` a ``weight`` without memory. ``loading`` puts another one in its place."""
    empty = torch.empty(shape, dtype=dtype, device="meta")
    weight = nn.Parameter(empty, requires_grad=False)
    known = {"input_dim": 1, "output_dim": 0, "weight_loader": loading}
    set_weight_attrs(weight, {**known, **attributes})
    layer.register_parameter("weight", weight)


def put(layer: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
    """Give ``layer`` frozen parameters, which replace parameters of the same names."""
    for name, tensor in tensors.items():
        layer._parameters.pop(name, None)
        parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)
