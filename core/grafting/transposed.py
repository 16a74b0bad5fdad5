"""Recognise linear layers with a transposed weight, such as those of GPT-2."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from opgraft.grafting.expressions import Expression
from opgraft.grafting.interface import check_interface
from opgraft.grafting.traced import SHAPES, Shape, refuses, traced_function, traced_module
from torch import Tensor, nn
from torch.nn import functional as F

_PARAMETERS = ("weight", "bias")


def transposed_linear(module: nn.Module) -> Mapping[str, Any] | None:
    """Return the arguments for ``TransposedLinear`` if a module computes the same."""
    if type(module).__module__.startswith("torch."):
        return None
    if module._modules or module._buffers or len(module._parameters) != 2:
        return None

    weight, bias = (module._parameters.get(name) for name in _PARAMETERS)
    if weight is None or bias is None:
        return None
    if weight.dim() != 2 or bias.shape != weight.shape[1:]:
        return None

    in_features, out_features = weight.shape
    # Tracing is slow, so everything above is asked first.
    if not all(_agrees(module, (*rows, in_features)) for rows in SHAPES):
        return None

    check_interface(type(module))
    return {"in_features": in_features, "out_features": out_features}


def _agrees(module: nn.Module, x: Shape) -> bool:
    """Return True if a module computes the linear map for this shape, or refuses the shape."""
    shapes = (tuple(module.get_parameter(name).shape) for name in _PARAMETERS)
    expression = traced_module(module, _PARAMETERS, x)
    if expression is None:
        return refuses(module, _PARAMETERS, x)
    return bool(expression == _form(*shapes, x))


@functools.lru_cache(maxsize=256)
def _form(weight: Shape, bias: Shape, x: Shape) -> Expression:
    def form(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, parameters["weight"].t(), parameters["bias"])

    return traced_function(form, {"weight": weight, "bias": bias}, x)
