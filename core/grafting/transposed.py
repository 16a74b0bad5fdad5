"""Recognises linear layers whose weight lies the other way round, as those of GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from opgraft.grafting.expressions import Expression
from opgraft.grafting.interface import check_interface
from opgraft.grafting.traced import SHAPES, takes, traced_function, traced_module
from torch import Tensor, nn
from torch.nn import functional as F

_PARAMETERS = ("weight", "bias")


def transposed_linear(module: nn.Module) -> Mapping[str, Any] | None:
    """Return the arguments for ``TransposedLinear`` if a module computes it."""
    weight, bias = (module._parameters.get(name) for name in _PARAMETERS)
    if weight is None or bias is None or module._modules or len(module._parameters) != 2 or module._buffers:
        return None
    if type(module).__module__.startswith("torch.") or weight.dim() != 2 or bias.shape != weight.shape[1:]:
        return None
    inputs = [torch.zeros(*rows, weight.shape[0]) for rows in SHAPES]
    if traced_module(module, _PARAMETERS, inputs[0]) != _form(weight, bias, inputs[0]):
        return None
    # Where a module takes no such input the op takes more than it.
    further = [x for x in inputs[1:] if takes(module, _PARAMETERS, x)]
    if any(traced_module(module, _PARAMETERS, x) != _form(weight, bias, x) for x in further):
        return None
    check_interface(type(module))
    return {"in_features": weight.shape[0], "out_features": weight.shape[1]}


def _form(weight: Tensor, bias: Tensor, x: Tensor) -> Expression:
    shapes = {"weight": tuple(weight.shape), "bias": tuple(bias.shape)}
    return traced_function(lambda parameters, x: F.linear(x, parameters["weight"].t(), parameters["bias"]), shapes, x)
