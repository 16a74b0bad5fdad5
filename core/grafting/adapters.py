"""The built-in rows of the table by which ``graft`` recognises modules.

torch's own classes are recognised by their exact type, other modules by what they compute: a module without children
is traced, and compared with the forms below; modules that combine such are in ``composites``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from opgraft.adapter import Adapter, LeaveAlone
from opgraft.binding.custom_op import CustomOp
from opgraft.grafting.composites import composite_adapters
from opgraft.grafting.expressions import (
    Expression,
    NotExpressible,
    activation_form,
    constants_of,
    expression_of,
    norm_form,
    result_dtype,
)
from opgraft.grafting.interface import check_interface
from opgraft.ops import GELU, FastGELU, GemmaRMSNorm, LayerNorm, Linear, NewGELU, QuickGELU, RMSNorm, SiLU
from torch import Tensor, nn

_TANH_SCALE = math.sqrt(2.0 / math.pi)

_ACTIVATIONS: tuple[tuple[str, type[nn.Module], dict[str, Any], Callable[[Tensor], Tensor]], ...] = (
    ("GELU", GELU, {}, F.gelu),
    ("GELU by erf", GELU, {}, lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2.0)))),
    ("GELU, tanh form", GELU, {"approximate": "tanh"}, partial(F.gelu, approximate="tanh")),
    ("GELU of GPT-2", NewGELU, {}, lambda x: 0.5 * x * (1 + torch.tanh(_TANH_SCALE * (x + 0.044715 * x**3)))),
    ("fast GELU", FastGELU, {}, lambda x: 0.5 * x * (1 + torch.tanh(_TANH_SCALE * x * (1 + 0.044715 * x**2)))),
    ("quick GELU", QuickGELU, {}, lambda x: x * torch.sigmoid(1.702 * x)),
    ("SiLU", SiLU, {}, F.silu),
)

_NORMS: tuple[tuple[str, type[nn.Module], Callable[[Tensor, Tensor, float], Tensor]], ...] = (
    ("RMS norm", RMSNorm, lambda x, weight, eps: weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)),
    (
        "Gemma's RMS norm",
        GemmaRMSNorm,
        lambda x, weight, eps: (1 + weight) * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps),
    ),
)


def builtin_adapters(dtype: torch.dtype | None = None) -> tuple[Adapter, ...]:
    """The built-in rows, in the order in which they are tried. The last one says why a module is not recognised.

    The rows remember what they traced: use them for one walk over a model, whose activations have the ``dtype``.
    """
    leaves = _Leaves(dtype)
    return (
        Adapter("torch.nn.Linear", Linear, _linear),
        Adapter("torch.nn.LayerNorm", LayerNorm, _layer_norm),
        Adapter("torch.nn.RMSNorm", RMSNorm, partial(_rms_norm, dtype)),
        Adapter("torch.nn.GELU", GELU, _gelu),
        Adapter("torch.nn.SiLU", SiLU, _silu),
        *(Adapter(name, op, partial(leaves.activation, form, kwargs)) for name, op, kwargs, form in _ACTIVATIONS),
        *(Adapter(name, op, partial(leaves.norm, form)) for name, op, form in _NORMS),
        *composite_adapters(),
        Adapter("none", CustomOp, leaves.refuse),
    )


def _linear(module: nn.Module) -> Mapping[str, Any] | None:
    if type(module) is not nn.Linear:
        return None
    out_features, in_features = module.weight.shape
    return {"in_features": in_features, "out_features": out_features, "bias": module.bias is not None}


def _layer_norm(module: nn.Module) -> Mapping[str, Any] | None:
    if type(module) is not nn.LayerNorm:
        return None
    return {
        "normalized_shape": module.normalized_shape,
        "eps": module.eps,
        "elementwise_affine": module.elementwise_affine,
        "bias": module.bias is not None,
    }


def _rms_norm(dtype: torch.dtype | None, module: nn.Module) -> Mapping[str, Any] | None:
    if type(module) is not nn.RMSNorm:
        return None
    if len(module.normalized_shape) != 1:
        raise LeaveAlone("RMSNorm takes the mean over one dimension, this module over several")
    _check_dtypes(module, dtype)
    eps = module.eps
    if eps is None:
        if module.weight is None:
            raise LeaveAlone("eps=None depends on the dtype of the input, which no weight tells")
        # torch computes half types in float32 and takes that type's eps
        eps = torch.finfo(torch.promote_types(module.weight.dtype, torch.float32)).eps
    return {"hidden_size": module.normalized_shape[0], "eps": eps, "has_weight": module.weight is not None}


def _gelu(module: nn.Module) -> Mapping[str, Any] | None:
    return {"approximate": module.approximate} if type(module) is nn.GELU else None


def _silu(module: nn.Module) -> Mapping[str, Any] | None:
    return {"inplace": module.inplace} if type(module) is nn.SiLU else None


class _Leaves:
    """Recognises modules without children by their expressions; each module is traced once."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._seen: dict[nn.Module, Expression | NotExpressible] = {}

    def activation(
        self, form: Callable[[Tensor], Tensor], kwargs: Mapping[str, Any], module: nn.Module
    ) -> Mapping[str, Any] | None:
        if self._expression(module) != activation_form(form):
            return None
        check_interface(type(module))
        return kwargs

    def norm(self, form: Callable[[Tensor, Tensor, float], Tensor], module: nn.Module) -> Mapping[str, Any] | None:
        expression = self._expression(module)
        if "weight" not in module._parameters or isinstance(expression, NotExpressible):
            return None
        shape = module.get_parameter("weight").shape
        eps = next((c for c in constants_of(expression) if c > 0 and norm_form(form, c) == expression), None)
        if eps is None or len(shape) != 1 or shape[0] == 1:  # one number may scale an input of any width
            return None
        check_interface(type(module))
        _check_dtypes(module, self._dtype)
        return {"hidden_size": shape[0], "eps": eps}

    def refuse(self, module: nn.Module) -> None:
        if not module._modules or module._parameters:
            expression = self._expression(module)
            why = f": {expression}" if isinstance(expression, NotExpressible) and str(expression) else ""
            raise LeaveAlone(f"no adapter recognises it{why}")

    def _expression(self, module: nn.Module) -> Expression | NotExpressible:
        if module not in self._seen:
            self._seen[module] = _attempt(module)
        return self._seen[module]


def _check_dtypes(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Raise ``LeaveAlone`` if a norm may round or promote otherwise than the op on input of another dtype.

    The op multiplies in the weight's dtype and returns the input's. Many norms promote: with a float32 weight they
    make float32 of bfloat16 input.
    """
    weight = module._parameters["weight"]
    if weight is None or dtype in (None, weight.dtype):
        return
    narrower = torch.promote_types(weight.dtype, dtype) != weight.dtype
    if narrower or result_dtype(module, dtype, weight.dtype) != dtype:
        raise LeaveAlone(
            f"its weight is {weight.dtype} in a model of {dtype}: the op would return another dtype, or round otherwise"
        )


def _attempt(module: nn.Module) -> Expression | NotExpressible:
    tensors = {name for name, value in (*module._parameters.items(), *module._buffers.items()) if value is not None}
    if type(module).__module__.startswith("torch.") or module._modules:
        return NotExpressible()
    if tensors - {"weight"} or module._buffers:
        return NotExpressible("it has other tensors than one weight")
    try:
        return expression_of(module)
    except NotExpressible as verdict:
        return verdict
    except Exception as error:  # whatever code of the model's author raises when it is traced
        return NotExpressible(f"tracing it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
