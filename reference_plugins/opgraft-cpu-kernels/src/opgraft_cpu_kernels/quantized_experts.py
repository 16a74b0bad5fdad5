"""Experts with quantized weights: the layers of each chosen one run as quantized linear layers do, on few tokens over
the codes as they are.

For codes in 8-bit floating point, for MXFP4, and for whatever the kernels refuse, opgraft's own definition runs, which
makes plain numbers of an expert's weights first.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from opgraft import functional
from opgraft.ops.checks import values_are_known
from opgraft.ops.fused_moe.functional import combined, expect_ids, sorted_by_expert
from opgraft.ops.linear.weight_cache import watched
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.arguments import INTEGERS
from opgraft_cpu_kernels.kernels import DTYPES, REFUSED, op
from opgraft_cpu_kernels.quantized import in_lanes

Quantized = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Codes, scales, offsets and bias of all experts."""


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
    gate_up, down = (w13, w13_scales, w13_offsets, w13_bias), (w2, w2_scales, w2_offsets, w2_bias)
    if not is_dynamo_compiling() and _takes(x, gate_up, down, topk_weights, topk_ids, activation):
        try:
            return _on_codes(x, gate_up, down, topk_weights, topk_ids, activation)
        except REFUSED:
            pass
    return functional.quantized_experts.native(
        x,
        w13,
        w13_scales,
        w2,
        w2_scales,
        topk_weights,
        topk_ids,
        activation,
        w13_offsets,
        w2_offsets,
        w13_bias,
        w2_bias,
    )


def _takes(
    x: Tensor, gate_up: Quantized, down: Quantized, topk_weights: Tensor, topk_ids: Tensor, activation: str
) -> bool:
    """Tell whether the kernels take codes like these; what else does not fit, they refuse."""
    given = [tensor for tensor in (*gate_up, *down) if tensor is not None]
    known = values_are_known(topk_ids) and values_are_known(x) and not watched()
    if not known or activation not in _ACTIVATIONS or not _are_choices(x, topk_weights, topk_ids):
        return False
    if any(tensor.dim() < 2 or len(tensor) != len(given[0]) or not tensor.is_cpu for tensor in given):
        return False
    if any(tensor.dim() != 3 for tensor in (*gate_up[:2], *down[:2])) or down[0].shape[1] != x.shape[1]:
        return False
    return _in_lanes(x.shape[1], gate_up) and _in_lanes(gate_up[0].shape[1] // 2, down)


def _are_choices(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> bool:
    """Tell whether each row of ``x`` has weights and ids of experts."""
    if x.dtype not in DTYPES or topk_ids.dtype not in INTEGERS or not topk_weights.is_floating_point():
        return False
    if not (x.is_cpu and topk_ids.is_cpu and topk_weights.is_cpu):
        return False
    return x.dim() == topk_ids.dim() == 2 and len(x) == len(topk_ids) and topk_ids.shape == topk_weights.shape


def _in_lanes(inputs: int, weights: Quantized) -> bool:
    codes, scales = weights[:2]
    return scales.dtype in DTYPES and len(scales) > 0 and in_lanes(inputs, codes[0], scales[0])


def _on_codes(
    x: Tensor, gate_up: Quantized, down: Quantized, topk_weights: Tensor, topk_ids: Tensor, activation: str
) -> Tensor:
    expect_ids("quantized_experts", topk_ids, len(gate_up[0]))
    rows, order, bounds = sorted_by_expert(x, topk_ids, len(gate_up[0]))
    hidden = _ACTIVATIONS[activation](_products(rows, bounds, gate_up))
    return combined(_products(hidden, bounds, down), order, bounds, topk_weights).detach()


def _products(rows: Tensor, bounds: list[int], weights: Quantized) -> Tensor:
    """Multiply the rows of each expert, of which ``bounds`` says where they begin, with its weights; zeros before."""
    made = [rows.new_zeros(bounds[0], weights[0].shape[1])]
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            of_expert = (None if tensor is None else tensor[expert] for tensor in weights)
            made.append(_quantized_linear(rows[begin:end], *of_expert))
    return torch.cat(made)


_quantized_linear = op("quantized_linear")
_ACTIVATIONS = {
    "silu": op("silu_and_mul"),
    "gelu": op("gelu_and_mul"),
    "swigluoai": op("swigluoai_and_mul"),
}
"""Gated activations by the names that models give them."""
