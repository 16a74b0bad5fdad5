"""Spec of the linear layer with its epilogues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.ops import linear as ops
from opgraft.ops.activation.spec import gelu, silu
from opgraft.ops.linear import functional
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec, Outside, with_parameters
from torch import Tensor, nn
from torch.nn import functional as F

OUT_FEATURES = 5

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": lambda y: (y > 0) * y,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda y: gelu(y, "tanh"),
}


def _linear_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    """Draw weights as small as initial ones, so that a sum is about as large as one number."""
    return {
        "x": draw(*lead, size),
        "weight": draw(OUT_FEATURES, size) / size**0.5,
        "bias": draw(OUT_FEATURES),
    }


def _residual(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    return draw(*lead, OUT_FEATURES)


def _reference_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Return ``activation(x · weightᵀ + bias) + residual`` in float64."""
    y = torch.einsum("...i,oi->...o", x, weight)
    if bias is not None:
        y = y + bias
    y = ACTIVATIONS[activation](y)
    return y if residual is None else y + residual


def _linear_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> tuple[nn.Module, tuple[Any, ...]]:
    op = ops.Linear(x.shape[-1], OUT_FEATURES, bias is not None, activation=activation)
    arguments = (x,) if residual is None else (x, residual)
    return with_parameters(op, weight=weight, bias=bias), arguments


def _linear_of_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor | None:
    # torch has neither an activation nor a residual.
    if activation != "none" or residual is not None:
        return None
    return F.linear(x, weight, bias)


def _linear_flops(x: Tensor, weight: Tensor, **others: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


SPECS = (
    OpSpec(
        functional.linear,
        _linear_inputs,
        _reference_linear,
        _linear_flops,
        module=_linear_op,
        variants={
            "": {},
            "no bias": {"bias": None},
            "residual": {"residual": _residual},
            **{name: {"activation": name} for name in ACTIVATIONS if name != "none"},
            "gelu and residual": {"activation": "gelu", "residual": _residual},
        },
        tolerances=HALF_NORM,
        outside=(Outside("torch.nn.functional.linear", _linear_of_torch),),
    ),
)
