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
        name: what the report calls it.
        op: the op class that computes it.
        formula: of the input, the weight, the bias and eps.
        parameters: those of weight and bias that it uses.
    """

    name: str
    op: type[nn.Module]
    formula: _Formula
    parameters: tuple[str, ...] = ("weight",)

    def settings(self, module: nn.Module, expression: Expression) -> Mapping[str, Any] | None:
        """Give the arguments for ``op`` if the expression is this formula with some eps over a module's parameters."""
        if (
            tuple(name for name in ("weight", "bias") if module._parameters.get(name) is not None)
            != self.parameters
        ):
            return None
        size, expression = _size_of(module, expression)
        eps = next(
            (
                c
                for c in constants_of(expression)
                if c > 0 and norm_form(self.formula, c) == expression
            ),
            None,
        )
        if eps is not None and self.op is UnscaledRMSNorm:
            return {"eps": eps}
        if eps is None or size is None:
            return None
        if self.op is LayerNorm:
            affine = {
                "elementwise_affine": bool(self.parameters),
                "bias": "bias" in self.parameters,
            }
            return {"normalized_shape": (size,), "eps": eps, **affine}
        return {"hidden_size": size, "eps": eps}


def _size_of(module: nn.Module, expression: Expression) -> tuple[int | None, Expression]:
    """Return the size of a module's rows, ``None`` if it takes several, and its expression without that size."""
    if isinstance(expression, tuple) and expression[0] == "rows":
        return expression[1], expression[2]
    shapes = {tuple(p.shape) for p in module._parameters.values() if p is not None}
    (shape,) = shapes if len(shapes) == 1 else ((),)
    # One number may scale an input of any width.
    return (shape[0] if len(shape) == 1 and shape[0] > 1 else None), expression


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
        usual: that of most elements, which activations are taken to have.
        widest: that to which all promote.
    """

    usual: torch.dtype | None = None
    widest: torch.dtype | None = None


UNKNOWN = Dtypes()


def check_dtypes(module: nn.Module, op: type[nn.Module], dtypes: Dtypes) -> None:
    """Raise ``LeaveAlone`` if a norm may round or promote otherwise than the op on input of another dtype.

    The op multiplies in the weight's dtype and returns the input's. Many norms promote: with a float32 weight they
    make float32 of bfloat16 input. T5's makes bfloat16 of float32 input, if that is the dtype of its weight.
    """
    weight, usual = module._parameters.get("weight"), dtypes.usual
    if weight is None:
        return
    given = f"its weight is {weight.dtype} in a model of"
    if usual not in (None, weight.dtype):
        narrower = torch.promote_types(weight.dtype, usual) != weight.dtype
        if narrower or result_dtype(module, usual, weight.dtype) != usual:
            raise LeaveAlone(
                f"{given} {usual}: the op would return another dtype, or round otherwise"
            )
    widest = dtypes.widest or weight.dtype
    if torch.promote_types(widest, weight.dtype) == weight.dtype or type(
        module
    ).__module__.startswith("torch."):
        return
    if op is LayerNorm or result_dtype(module, widest, weight.dtype) != widest:
        raise LeaveAlone(
            f"{given} {widest} too, which the op may not take, or not turn into {weight.dtype}"
        )
