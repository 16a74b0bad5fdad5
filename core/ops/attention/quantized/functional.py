"""Attention with a result in 8-bit floating point (arXiv:1706.03762, arXiv:2209.05433)."""

from __future__ import annotations

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.attention.functional import scaled_dot_product_attention
from opgraft.ops.quantization.functional import GroupShape, quant_fp8_static
from torch import Tensor

__all__ = ["scaled_dot_product_attention_quant_fp8_static"]

FP8 = torch.float8_e4m3fn


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output_scale: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dtype: torch.dtype = FP8,
) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=dtype)


@register_functional("scaled_dot_product_attention", _fake, differentiable=False)
def scaled_dot_product_attention_quant_fp8_static(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output_scale: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dtype: torch.dtype = FP8,
) -> Tensor:
    """Compute ``scaled_dot_product_attention`` without dropout, and quantise the result.

    Sources: arXiv:1706.03762, arXiv:2209.05433. The result is rounded to the dtype of ``query``
    first; a kernel may leave out this rounding. There are no gradients.

    Args:
        query: this and the other arguments, but ``output_scale`` and ``dtype``, are those of
            ``scaled_dot_product_attention``.
        key: see there.
        value: see there.
        output_scale: the scale of the result, ``[1]`` or ``[]``.
        attn_mask: see there.
        is_causal: see there.
        scale: multiplies the scores.
        enable_gqa: see there.
        dtype: an fp8 dtype.

    Raises:
        ValueError: as ``scaled_dot_product_attention`` or ``quant_fp8_static`` does.
    """
    attended = scaled_dot_product_attention.native(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return quant_fp8_static.native(attended, output_scale, GroupShape.PER_TENSOR, dtype)
