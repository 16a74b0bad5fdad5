"""Recognises linear layers whose weight lies the other way round, as those of GPT-2."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from opgraft.grafting.expressions import Expression
from opgraft.grafting.interface import check_interface
from opgraft.grafting.traced import SHAPES, Shape, refuses, traced_function, traced_module
from torch import nn
from torch.nn import functional as F

_PARAMETERS = ("weight", "bias")


def transposed_linear(module: nn.Module) -> Mapping[str, Any] | None:
    """Return the arguments for ``TransposedLinear`` if a module computes it."""
    weight, bias = (module._parameters.get(name) for name in _PARAMETERS)
    if (
        weight is None
        or bias is None
        or module._modules
        or len(module._parameters) != 2
        or module._buffers
    ):
        return None
    if (
        type(module).__module__.startswith("torch.")
        or weight.dim() != 2
        or bias.shape != weight.shape[1:]
    ):
        return None
    if not all(_agrees(module, (*rows, weight.shape[0])) for rows in SHAPES):
        return None
    check_interface(type(module))
    return {"in_features": weight.shape[0], "out_features": weight.shape[1]}


def _agrees(module: nn.Module, x: Shape) -> bool:
    form = _form(*(tuple(module.get_parameter(name).shape) for name in _PARAMETERS), x)
    expression = traced_module(module, _PARAMETERS, x)
    return expression == form or (expression is None and refuses(module, _PARAMETERS, x))


@functools.lru_cache(maxsize=256)
def _form(weight: Shape, bias: Shape, x: Shape) -> Expression:
    shapes = {"weight": weight, "bias": bias}
    return traced_function(
        lambda parameters, x: F.linear(x, parameters["weight"].t(), parameters["bias"]), shapes, x
    )
