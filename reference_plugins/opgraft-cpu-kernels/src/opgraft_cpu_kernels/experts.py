"""Experts on few tokens, over the weights as they are; on many, and for whatever the kernel refuses, opgraft's own."""

from __future__ import annotations

from opgraft import functional
from opgraft.kernels import watched
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.kernels import DTYPES, REFUSED, op
from opgraft_cpu_kernels.library import path_or_none
from opgraft_cpu_kernels.linear import FEW


def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """Compute the form of that name, reading of the weights only those of chosen experts."""
    if not is_dynamo_compiling() and _takes(x, topk_ids, w13.shape[0]):
        try:
            return _fused_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    return functional.fused_experts.native(
        x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias
    )


def _takes(x: Tensor, topk_ids: Tensor, experts: int) -> bool:
    """Return True if experts have few rows each, up to the limit of linear layers.

    On a core of Zen 3 ("avx2") the native definition takes 1.7 times as long for 8 rows of each expert in float32,
    and 3.8 to 7.4 times for 4 to 256 rows in half types.
    """
    limit = FEW.get((path_or_none(), x.dtype), 0)
    return x.dtype in DTYPES and x.is_cpu and topk_ids.numel() <= limit * experts and not watched()


_fused_experts = op("fused_experts")
