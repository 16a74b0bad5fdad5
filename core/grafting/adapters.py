"""The built-in rows of the tables of ``graft``.

torch's own classes are recognised by exact type, and other modules by their computation: a module
without children is traced, and the expression is compared with the forms below. ``composites`` has
the rows for modules with children.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from opgraft.binding.custom_op import CustomOp
from opgraft.grafting import attention, direct_attention, rotary, scans
from opgraft.grafting.composites import composite_adapters
from opgraft.grafting.experts import experts_adapter
from opgraft.grafting.expressions import (
    Expression,
    NotExpressible,
    activation_form,
    expression_of,
)
from opgraft.grafting.gated_norms import gated_norm
from opgraft.grafting.interface import check_interface
from opgraft.grafting.norms import NORMS, UNKNOWN, Dtypes, Norm, check_dtypes
from opgraft.grafting.traced import once_per_kind
from opgraft.grafting.transposed import transposed_linear
from opgraft.ops import (
    GELU,
    FastGELU,
    LayerNorm,
    Linear,
    NewGELU,
    QuickGELU,
    ReLU,
    ReLUSquaredActivation,
    RMSNorm,
    RMSNormGated,
    SiLU,
    TransposedLinear,
)
from opgraft.registry.adapter import Adapter, LeaveAlone
from torch import Tensor, nn

_TANH_SCALE = math.sqrt(2.0 / math.pi)

_ACTIVATIONS: tuple[
    tuple[str, type[nn.Module], dict[str, Any], Callable[[Tensor], Tensor]], ...
] = (
    ("GELU", GELU, {}, F.gelu),
    ("GELU by erf", GELU, {}, lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2.0)))),
    ("GELU, tanh form", GELU, {"approximate": "tanh"}, partial(F.gelu, approximate="tanh")),
    (
        "GELU of GPT-2",
        NewGELU,
        {},
        lambda x: 0.5 * x * (1 + torch.tanh(_TANH_SCALE * (x + 0.044715 * x**3))),
    ),
    (
        "fast GELU",
        FastGELU,
        {},
        lambda x: 0.5 * x * (1 + torch.tanh(_TANH_SCALE * x * (1 + 0.044715 * x**2))),
    ),
    ("quick GELU", QuickGELU, {}, lambda x: x * torch.sigmoid(1.702 * x)),
    ("SiLU", SiLU, {}, F.silu),
    ("ReLU", ReLU, {}, F.relu),
    ("squared ReLU", ReLUSquaredActivation, {}, lambda x: F.relu(x) ** 2),
)


CALL_ADAPTERS = (attention.ADAPTER, direct_attention.ADAPTER, rotary.ADAPTER, *scans.ADAPTERS)


def builtin_adapters(dtypes: Dtypes = UNKNOWN) -> tuple[Adapter, ...]:
    """Return the built-in rows for modules, in the order of the trials.

    The last row refuses modules with a reason. The rows keep traces: use the rows for one walk
    over a model, with the ``dtypes`` of the model's parameters.
    """
    leaves = _Leaves(dtypes)
    return (
        Adapter("torch.nn.Linear", Linear, _linear_arguments),
        Adapter("torch.nn.LayerNorm", LayerNorm, _layer_norm),
        Adapter("torch.nn.RMSNorm", RMSNorm, partial(_rms_norm, dtypes)),
        Adapter("torch.nn.GELU", GELU, _gelu),
        Adapter("torch.nn.SiLU", SiLU, partial(_elementwise, nn.SiLU)),
        Adapter("torch.nn.ReLU", ReLU, partial(_elementwise, nn.ReLU)),
        *(
            Adapter(name, op, partial(leaves.activation, form, kwargs))
            for name, op, kwargs, form in _ACTIVATIONS
        ),
        *(Adapter(norm.name, norm.op, partial(leaves.norm, norm)) for norm in NORMS),
        Adapter("gated RMS norm", RMSNormGated, once_per_kind(partial(gated_norm, dtypes.usual))),
        Adapter("transposed linear", TransposedLinear, once_per_kind(transposed_linear)),
        experts_adapter(),
        *composite_adapters(),
        Adapter("none", CustomOp, leaves.refuse),
    )


def _linear_arguments(module: nn.Module) -> Mapping[str, Any] | None:
    if type(module) is not nn.Linear:
        return None
    out_features, in_features = module.weight.shape
    return {
        "in_features": in_features,
        "out_features": out_features,
        "bias": module.bias is not None,
    }


def _layer_norm(module: nn.Module) -> Mapping[str, Any] | None:
    if type(module) is not nn.LayerNorm:
        return None
    return {
        "normalized_shape": module.normalized_shape,
        "eps": module.eps,
        "elementwise_affine": module.elementwise_affine,
        "bias": module.bias is not None,
    }


def _rms_norm(dtypes: Dtypes, module: nn.Module) -> Mapping[str, Any] | None:
    if type(module) is not nn.RMSNorm:
        return None
    # The op has one hidden size.
    if len(module.normalized_shape) != 1:
        raise LeaveAlone("RMSNorm takes the mean over one dimension, this module over several")

    check_dtypes(module, RMSNorm, dtypes)
    return {
        "hidden_size": module.normalized_shape[0],
        "eps": module.eps,
        "has_weight": module.weight is not None,
        "dtype": dtypes.usual,
    }


def _gelu(module: nn.Module) -> Mapping[str, Any] | None:
    return {"approximate": module.approximate} if type(module) is nn.GELU else None


def _elementwise(cls: type[nn.Module], module: nn.Module) -> Mapping[str, Any] | None:
    return {"inplace": module.inplace} if type(module) is cls else None


class _Leaves:
    """Recognises modules without children by expressions. Each kind of module is traced once."""

    def __init__(self, dtypes: Dtypes) -> None:
        self._dtypes = dtypes
        self._expression = once_per_kind(_attempt)

    def activation(
        self, form: Callable[[Tensor], Tensor], kwargs: Mapping[str, Any], module: nn.Module
    ) -> Mapping[str, Any] | None:
        if self._expression(module) != activation_form(form):
            return None
        check_interface(type(module))
        return kwargs

    def norm(self, norm: Norm, module: nn.Module) -> Mapping[str, Any] | None:
        expression = self._expression(module)
        if isinstance(expression, NotExpressible):
            return None
        settings = norm.settings(module, expression)
        if settings is None:
            return None
        check_interface(type(module))
        check_dtypes(module, norm.op, self._dtypes)
        return settings

    def refuse(self, module: nn.Module) -> None:
        if module._modules and not module._parameters:
            return
        expression = self._expression(module)
        if isinstance(expression, NotExpressible) and str(expression):
            raise LeaveAlone(f"no adapter recognises it: {expression}")
        raise LeaveAlone("no adapter recognises it")


def _attempt(module: nn.Module) -> Expression | NotExpressible:
    if type(module).__module__.startswith("torch.") or module._modules:
        return NotExpressible()

    held = (*module._parameters.items(), *module._buffers.items())
    tensors = {name for name, value in held if value is not None}
    # Expressions know these two names only.
    if tensors - {"weight", "bias"} or module._buffers:
        return NotExpressible("it has other tensors than a weight and a bias")

    try:
        return expression_of(module)
    except NotExpressible as verdict:
        return verdict
    except Exception as error:  # code of the model's author may raise anything
        first_line = str(error).partition("\n")[0]
        return NotExpressible(f"tracing it raised {type(error).__name__}: {first_line}")
