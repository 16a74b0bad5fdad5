"""The linear layer in bfloat16, with its activation and residual."""

from __future__ import annotations

import torch
from opgraft.kernels import fits, packed_linear, requires_gradient
from torch import Tensor

from opgraft_zentorch.library import DTYPES, OPERATORS
from opgraft_zentorch.weights import PackedWeights, are_taken

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

# In float32 zentorch's sums are less exact than torch's, and sometimes miss the tolerance.
OFFERED = DTYPES - {torch.float32}

_WEIGHTS = PackedWeights(OPERATORS.zentorch_weight_prepack_for_linear.default)


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
    taken = activation in POST_OPS and weight.dtype in OFFERED
    if taken and are_taken(x, weight, weight.dtype):
        taken = fits(x, weight, bias, residual)
        # The operators have no backward.
        if taken and not requires_gradient(x, weight, bias, residual):
            packed = _WEIGHTS.of(x, weight)
    if packed is None:
        return packed_linear(x, weight, bias, activation, residual)
    out: Tensor
    whole = x.contiguous()
    post_op = POST_OPS[activation]
    if residual is not None and activation != "relu":
        other = residual.contiguous()
        out = OPERATORS.zentorch_linear_unary_binary.default(
            whole,
            packed,
            other,
            bias,
            is_weight_prepacked=True,
            post_op_1=post_op,
            post_op_2="add",
        )
        return out
    out = OPERATORS.zentorch_linear_unary.default(
        whole,
        packed,
        bias,
        is_weight_prepacked=True,
        post_op=post_op,
    )
    if activation == "relu":
        out.relu_()
    if residual is not None:
        out.add_(residual)
    return out
