"""Experts with quantized weights, by their codes as they are, or plain numbers of a few rows of a matrix at a time.

For what the kernel refuses, opgraft's own definition runs, which makes plain numbers of an expert's weights first.
"""

from __future__ import annotations

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
    """Compute the form of that name, reading of the weights only those of chosen experts."""
    given = x, w13, w13_scales, w2, w2_scales, topk_weights, topk_ids
    more = activation, w13_offsets, w2_offsets, w13_bias, w2_bias
    if x.dtype in DTYPES and x.is_cpu and not is_dynamo_compiling() and not watched():
        try:
            return _quantized_experts(*given, *more)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    return functional.quantized_experts.native(*given, *more)


_quantized_experts = op("quantized_experts")
