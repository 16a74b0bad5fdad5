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
from opgraft.binding.custom_op import CustomOp
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


def builtin_adapters(dtypes: Dtypes = UNKNOWN) -> tuple[Adapter, ...]:
    """Return the built-in rows, in the order in which they are tried. The last one says why a module is not recognised.

    The rows remember what they traced: use them for one walk over a model, whose parameters have the ``dtypes``.
    """
    leaves = _Leaves(dtypes)
    return (
        Adapter("torch.nn.Linear", Linear, _linear),
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


def _linear(module: nn.Module) -> Mapping[str, Any] | None:
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
    """Recognises modules without children by their expressions; each kind of module is traced once."""

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
        found = (
            None if isinstance(expression, NotExpressible) else norm.settings(module, expression)
        )
        if found is None:
            return None
        check_interface(type(module))
        check_dtypes(module, norm.op, self._dtypes)
        return found

    def refuse(self, module: nn.Module) -> None:
        if not module._modules or module._parameters:
            expression = self._expression(module)
            why = (
                f": {expression}"
                if isinstance(expression, NotExpressible) and str(expression)
                else ""
            )
            raise LeaveAlone(f"no adapter recognises it{why}")


def _attempt(module: nn.Module) -> Expression | NotExpressible:
    tensors = {
        name
        for name, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None
    }
    if type(module).__module__.startswith("torch.") or module._modules:
        return NotExpressible()
    if tensors - {"weight", "bias"} or module._buffers:
        return NotExpressible("it has other tensors than a weight and a bias")
    try:
        return expression_of(module)
    except NotExpressible as verdict:
        return verdict
    except Exception as error:  # whatever code of the model's author raises when it is traced
        return NotExpressible(
            f"tracing it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )
