"""Experts with quantized weights.

The kernel reads the codes as they lie in memory. With many tokens it turns a few rows of a matrix
at a time into plain numbers. If the kernel refuses its arguments, opgraft's native definition
runs, which turns all weights of an expert into plain numbers first.
"""

from __future__ import annotations

from collections.abc import Callable

from opgraft import functional
from opgraft.kernels import watched
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.kernels import DTYPES, REFUSED, op


def quantized_experts(
    x: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w2: Tensor,
    w2_scales: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_offsets: Tensor | None = None,
    w2_offsets: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """Compute ``opgraft.functional.quantized_experts``. Only codes of chosen experts are read."""
    tensors = (x, w13, w13_scales, w2, w2_scales, topk_weights, topk_ids)
    optional = (w13_offsets, w2_offsets, w13_bias, w2_bias)
    if x.dtype in DTYPES and x.is_cpu and not is_dynamo_compiling() and not watched():
        try:
            return _quantized_experts(*tensors, activation, *optional)
        except REFUSED:
            pass
    return functional.quantized_experts.native(*tensors, activation, *optional)


_quantized_experts: Callable[..., Tensor] = op("quantized_experts")
