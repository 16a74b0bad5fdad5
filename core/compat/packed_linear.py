"""oneDNN's linear layer, over a plain weight or one that it has packed once.

torch has these operators for its compiler, which packs the weights of frozen models; there is no public name for them.
Where torch lacks one, or was built without oneDNN, ``missing`` says so, and callers run torch's own linear.
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
"""Activation → what the operator calls it, and which algorithm of it. Not relu: oneDNN's makes 0 of NaN."""

version_of = attrgetter("_version")
"""The count of writes to a tensor, by which autograd tells that a saved value has changed. It has no public
name. Tensors made in inference mode have none: ``RuntimeError``."""

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
    """Say why weights of ``dtype`` cannot be packed here, or return ``None``."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it so
        return "torch was built without oneDNN"
    if absent := _absent or tracing.cannot_tell:
        return absent
    if dtype == torch.float32 or (dtype == torch.bfloat16 and _packs_bfloat16()):
        return None
    return f"oneDNN packs no {dtype} here"


def pack(weight: Tensor) -> Tensor:
    """Pack the weight ``[out_features, in_features]`` in oneDNN's preferred layout: an opaque tensor of that shape."""
    with torch.no_grad():
        packed: Tensor = _reorder(weight, None)
        return packed


def unpack(packed: Tensor) -> Tensor:
    """Return the weight that was packed, bit by bit."""
    with torch.no_grad():
        return packed.to_dense()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Compute ``activation(x · weightᵀ + bias)``, rounded once, over a weight that is packed, or plain and contiguous.

    Unchecked; the bias is read as contiguous.
    """
    attribute, algorithm = POST_OPS[activation]
    result: Tensor = _linear(x, weight, bias, attribute, [], algorithm)
    return result


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Compute ``x · weightᵀ + bias + residual``, rounded once. As unchecked."""
    result: Tensor = _linear_add(x, residual, weight, bias, "add")
    return result


def watched() -> bool:
    """Tell whether something follows the operators that run, for which oneDNN's are opaque, or oneDNN is switched off.

    That is autocast, ``torch.func``, a dispatch mode such as a FLOP counter, ``torch.jit.trace``, and forward-mode
    differentiation, whose tangents the operators drop in silence.
    """
    return bool(
        torch.is_autocast_enabled("cpu")
        or tracing.followed_or_transformed()
        or not _onednn_enabled()
    )
