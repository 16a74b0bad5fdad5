"""Helpers of models in ``vllm.model_executor.models.utils``, and ``vllm.sequence``.

A model of a plugin has one stage of a pipeline in opgraft, so no layer is on another rank.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView
from typing import Any, Protocol

import torch
from opgraft.errors import ModelError
from torch import Tensor, nn


class IntermediateTensors:
    """Tensors for the next stage of a model."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, key: str | slice) -> Any:
        if isinstance(key, str):
            return self.tensors[key]
        return type(self)({name: tensor[key] for name, tensor in self.tensors.items()})

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.tensors[key] = value

    def __len__(self) -> int:
        return len(self.tensors)

    def items(self) -> ItemsView[str, Tensor]:
        return self.tensors.items()


class PPMissingLayer(nn.Identity):
    """Stands for a layer on another rank. opgraft makes none; models ask for instances."""


class LayerFunction(Protocol):
    """Makes a layer with the given prefix."""

    def __call__(self, *, prefix: str) -> nn.Module: ...


def make_layers(
    num_hidden_layers: int, layer_fn: LayerFunction, prefix: str
) -> tuple[int, int, nn.ModuleList]:
    """Return the first index, the index after the last one, and all layers of a model."""
    layers = nn.ModuleList(
        layer_fn(prefix=f"{prefix}.{index}") for index in range(num_hidden_layers)
    )
    return 0, num_hidden_layers, layers


def is_pp_missing_parameter(name: str, model: nn.Module) -> bool:
    """Return False: every parameter is on this rank."""
    return False


def make_empty_intermediate_tensors_factory(
    keys: list[str], hidden_size: int
) -> Callable[[int, torch.dtype, torch.device], IntermediateTensors]:
    """Return a maker of ``IntermediateTensors`` of zeros ``[batch, hidden_size]``."""

    def make(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        tensors = {
            key: torch.zeros(batch_size, hidden_size, dtype=dtype, device=device) for key in keys
        }
        return IntermediateTensors(tensors)

    return make


def maybe_prefix(prefix: str, name: str) -> str:
    """Return ``prefix.name``, or the name if the prefix is empty."""
    return f"{prefix}.{name}" if prefix else name


def extract_layer_index(layer_name: str, num_attn_module: int = 1) -> int:
    """Return the index of a layer from its name. Example: 1 for ``model.layers.1.self_attn``.

    Args:
        layer_name: the dotted name, with one number.
        num_attn_module: layers of attention in each layer of the model. If there are several, the
            name of such a layer may have a second number: its index in the layer.

    Raises:
        ModelError: the name has another count of numbers.
    """
    numbers = [int(part) for part in layer_name.split(".") if part.isdigit()]
    has_second = num_attn_module > 1 and "attn" in layer_name
    if len(numbers) == 1:
        return numbers[0]
    if has_second and len(numbers) == 2:
        return numbers[0] * num_attn_module + numbers[1]
    raise ModelError(
        f"the layer {layer_name!r:.80} has {len(numbers)} numbers in its name, expected one"
    )
