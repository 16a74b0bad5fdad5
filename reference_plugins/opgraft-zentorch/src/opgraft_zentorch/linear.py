"""The linear layer with its activation and residual, over weights in zentorch's own layout."""

from __future__ import annotations

from opgraft.kernels import WeightCache, fits, packed_linear, requires_gradient, watched
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from opgraft_zentorch.library import DTYPES, OPERATORS, is_plain

POST_OPS = {
    "none": "none",
    "relu": "none",
    "silu": "silu",
    "gelu": "gelu_erf",
    "gelu_tanh": "gelu_tanh",
}
"""Activation of ``linear`` → zentorch's name.

zentorch's relu returns 0 for NaN, so torch's runs.
"""

LEAST_ROWS = 16
"""A weight that is not frozen is packed in each call with at least this many rows."""

_COPIES = WeightCache()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``opgraft.functional.linear``, rounded once.

    opgraft's own kernel computes a call with few rows over a weight that is not frozen, and all
    calls that zentorch does not take.
    """
    packed = None
    if activation in POST_OPS and _taken(x, weight):
        packed = _packed(x, weight, bias, residual)
    if packed is None:
        return packed_linear(x, weight, bias, activation, residual)
    if residual is None or activation == "relu":
        return _in_two_steps(x, packed, bias, activation, residual)
    fused: Tensor = OPERATORS.zentorch_linear_unary_binary.default(
        x.contiguous(),
        packed,
        residual.contiguous(),
        bias,
        is_weight_prepacked=True,
        post_op_1=POST_OPS[activation],
        post_op_2="add",
    )
    return fused


def _in_two_steps(
    x: Tensor, packed: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """Compute the form over a packed weight, with relu and the residual by torch."""
    out: Tensor = OPERATORS.zentorch_linear_unary.default(
        x.contiguous(),
        packed,
        bias,
        is_weight_prepacked=True,
        post_op=POST_OPS[activation],
    )
    if activation == "relu":
        out.relu_()
    if residual is not None:
        out.add_(residual)
    return out


def _taken(x: Tensor, weight: Tensor) -> bool:
    """Return True if the weight is a plain matrix, and nobody looks on."""
    # A compiler cannot see whether a weight is frozen.
    if is_dynamo_compiling() or watched():
        return False
    # A subclass of Tensor may compute by itself.
    if type(x) is not Tensor:
        return False
    if type(weight) not in (nn.Parameter, Tensor):
        return False
    dtype = weight.dtype
    if dtype not in DTYPES or not is_plain(weight, dtype):
        return False
    if weight.dim() != 2:
        return False
    # zentorch prints an error if there is nothing to multiply.
    return bool(x.numel() and weight.numel())


def _packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor | None:
    """Return the weight in zentorch's layout, or None if opgraft's own kernel has to run."""
    if not fits(x, weight, bias, residual):
        return None
    if requires_gradient(x, weight, bias, residual):
        return None
    copied = _COPIES.copy_of(weight, _pack)
    if copied is not None:
        return copied
    # There is no copy of a weight that is not frozen: its owner may write to the weight.
    fewest = LEAST_ROWS * weight.shape[1]
    if x.numel() < fewest:
        return None
    return _pack(weight.detach())


def _pack(weight: Tensor) -> Tensor:
    # The operator reads a weight with gaps as if the gaps were numbers.
    whole = weight.contiguous()
    packed: Tensor = OPERATORS.zentorch_weight_prepack_for_linear.default(whole)
    return packed
