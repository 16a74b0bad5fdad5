"""The norms that ``graft`` recognises by their formula, over the last dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from opgraft.grafting.expressions import Expression, constants_of, norm_form, result_dtype
from opgraft.ops import GemmaRMSNorm, LayerNorm, RMSNorm, UnscaledRMSNorm
from opgraft.registry.adapter import LeaveAlone
from torch import Tensor, nn

_Formula = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Norm:
    """One formula of a norm.

    Attributes:
        name: of the row in the report.
        op: the op class that computes the formula.
        formula: of the input, the weight, the bias and eps.
        parameters: the names, among weight and bias, of the parameters in the formula.
    """

    name: str
    op: type[nn.Module]
    formula: _Formula
    parameters: tuple[str, ...] = ("weight",)

    def settings(self, module: nn.Module, expression: Expression) -> Mapping[str, Any] | None:
        """Return the arguments for ``op`` if the expression is this formula for some eps."""
        names = ("weight", "bias")
        present = [name for name in names if module._parameters.get(name) is not None]
        if tuple(present) != self.parameters:
            return None

        size, expression = _size_of(module, expression)
        eps = self._eps_of(expression)
        if eps is None:
            return None
        # Without a weight nothing depends on the size.
        if self.op is UnscaledRMSNorm:
            return {"eps": eps}
        if size is None:
            return None
        if self.op is not LayerNorm:
            return {"hidden_size": size, "eps": eps}

        return {
            "normalized_shape": (size,),
            "eps": eps,
            "elementwise_affine": bool(self.parameters),
            "bias": "bias" in self.parameters,
        }

    def _eps_of(self, expression: Expression) -> float | None:
        """Return the eps for equal expressions of the formula and the module."""
        for constant in constants_of(expression):
            if constant > 0 and norm_form(self.formula, constant) == expression:
                return constant
        return None


def _size_of(module: nn.Module, expression: Expression) -> tuple[int | None, Expression]:
    """Return the size of a module's rows, and the expression without the size.

    The size is ``None`` if the module takes rows of several sizes.
    """
    if isinstance(expression, tuple) and expression[0] == "rows":
        return expression[1], expression[2]
    shapes = {tuple(p.shape) for p in module._parameters.values() if p is not None}
    shape = shapes.pop() if len(shapes) == 1 else ()
    # One number may scale an input of any width.
    fixes_size = len(shape) == 1 and shape[0] > 1
    return shape[0] if fixes_size else None, expression


def _rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _layer(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return _rms(centred, eps)


NORMS = (
    Norm("RMS norm", RMSNorm, lambda x, weight, bias, eps: weight * _rms(x, eps)),
    Norm("RMS norm without weight", UnscaledRMSNorm, lambda x, weight, bias, eps: _rms(x, eps), ()),
    Norm(
        "Gemma's RMS norm", GemmaRMSNorm, lambda x, weight, bias, eps: (1 + weight) * _rms(x, eps)
    ),
    Norm(
        "layer norm",
        LayerNorm,
        lambda x, weight, bias, eps: weight * _layer(x, eps) + bias,
        ("weight", "bias"),
    ),
    Norm(
        "layer norm without bias", LayerNorm, lambda x, weight, bias, eps: weight * _layer(x, eps)
    ),
    Norm("layer norm without weight", LayerNorm, lambda x, weight, bias, eps: _layer(x, eps), ()),
)


class Dtypes(NamedTuple):
    """The floating-point dtypes of a model's parameters.

    Attributes:
        usual: dtype of most elements; activations are assumed to have the same.
        widest: all dtypes promote to this one.
    """

    usual: torch.dtype | None = None
    widest: torch.dtype | None = None


UNKNOWN = Dtypes()


def check_dtypes(module: nn.Module, op: type[nn.Module], dtypes: Dtypes) -> None:
    """Raise ``LeaveAlone`` if a norm may round or promote another dtype unlike the op.

    The op multiplies in the weight's dtype and returns the input's. Many norms promote: a float32
    weight makes float32 of bfloat16 input. T5's norm makes bfloat16 of float32 input if the weight
    is bfloat16.
    """
    weight = module._parameters.get("weight")
    if weight is None:
        return

    own = weight.dtype
    given = f"its weight is {own} in a model of"
    usual = dtypes.usual
    if usual is not None and usual != own:
        # The op multiplies in the weight's dtype, and would round where the norm does not.
        narrower = torch.promote_types(own, usual) != own
        if narrower or result_dtype(module, usual, own) != usual:
            raise LeaveAlone(
                f"{given} {usual}: the op would return another dtype, or round otherwise"
            )

    widest = dtypes.widest or own
    if torch.promote_types(widest, own) == own or type(module).__module__.startswith("torch."):
        return
    if op is LayerNorm or result_dtype(module, widest, own) != widest:
        raise LeaveAlone(f"{given} {widest} too, which the op may not take, or not turn into {own}")
