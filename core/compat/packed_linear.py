"""oneDNN's linear layer, over a plain weight or a weight that was packed once.

The compiler of torch uses these operators for frozen models. They have no public name. Without one
of them, or without oneDNN, ``missing`` gives the reason, and callers run the linear of torch.
"""

from __future__ import annotations

from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from opgraft.compat import tracing
from torch import Tensor

POST_OPS = MappingProxyType(
    {
        "none": ("none", ""),
        "silu": ("swish", ""),
        "gelu": ("gelu", "none"),
        "gelu_tanh": ("gelu", "tanh"),
    }
)
"""Activation → oneDNN's name and algorithm. relu is absent: oneDNN's relu makes 0 of NaN."""

version_of = attrgetter("_version")
"""The number of writes to a tensor. Autograd tells by the number that a saved value has changed.

A tensor of inference mode has no number: ``RuntimeError``.
"""

_linear: Any = None
_linear_add: Any = None
try:
    _linear = torch.ops.mkldnn._linear_pointwise.default
    _linear_add = torch.ops.mkldnn._linear_pointwise.binary
    _reorder = torch.ops.mkldnn._reorder_linear_weight.default
    _packs_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported
    _absent = None
except AttributeError as error:
    _absent = f"this torch has no operators for it ({error})"

try:
    _onednn_enabled = torch._C._get_mkldnn_enabled
except AttributeError as error:
    _absent = f"this torch cannot tell whether its operators are watched ({error})"


def missing(dtype: torch.dtype = torch.float32) -> str | None:
    """Return the reason if weights of ``dtype`` cannot be packed here, else ``None``."""
    # Torch has no annotations here.
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch was built without oneDNN"
    absent = _absent or tracing.cannot_tell
    if absent:
        return absent
    if dtype == torch.float32:
        return None
    if dtype == torch.bfloat16 and _packs_bfloat16():
        return None
    return f"oneDNN packs no {dtype} here"


def pack(weight: Tensor) -> Tensor:
    """Pack a weight ``[out_features, in_features]``. The result is opaque, of the same shape."""
    with torch.no_grad():
        packed: Tensor = _reorder(weight, None)
        return packed


def unpack(packed: Tensor) -> Tensor:
    """Return the plain weight of a packed one, bit by bit."""
    with torch.no_grad():
        return packed.to_dense()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Compute ``activation(x · weightᵀ + bias)``, rounded once.

    The weight is packed, or plain and contiguous. The bias is contiguous. Nothing is checked.
    """
    attribute, algorithm = POST_OPS[activation]
    result: Tensor = _linear(x, weight, bias, attribute, [], algorithm)
    return result


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Compute ``x · weightᵀ + bias + residual``, rounded once. Nothing is checked."""
    result: Tensor = _linear_add(x, residual, weight, bias, "add")
    return result


def watched() -> bool:
    """Return True if oneDNN is switched off, or something follows the operators.

    Autocast, ``torch.func``, a dispatch mode such as a FLOP counter and ``torch.jit.trace`` cannot
    look into the operators of oneDNN. The operators drop the tangents of forward-mode
    differentiation without an error.
    """
    return bool(
        torch.is_autocast_enabled("cpu")
        or tracing.followed_or_transformed()
        or not _onednn_enabled()
    )
