"""Attention over all keys at once, for query, key and value of at most four dimensions, without dropout.

What the kernel does not take is computed by the native definition, which is torch's function.
"""

from __future__ import annotations

import torch
from opgraft.functional import scaled_dot_product_attention as form
from opgraft.functional import scaled_dot_product_attention_quant_fp8_static as quantized_form
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.arguments import refusal
from opgraft_cpu_kernels.kernels import DTYPES, FP8, REFUSED, op

SINGLE = ((1,), ())
"""The shapes of a scale for the whole result."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the form of that name."""
    taken = query.dtype in DTYPES and query.is_cpu
    if taken and is_dynamo_compiling():  # compiled code cannot catch what an op raises
        fits = dropout_p == 0 and not (is_causal and attn_mask is not None)
        taken = fits and _fit(query, key, value, attn_mask, enable_gqa)
    if taken:
        try:
            return _attend(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        except REFUSED:
            pass
    return form.native(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


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
    """Compute the form of that name."""
    taken = query.dtype in DTYPES and query.is_cpu and dtype is FP8
    taken = taken and output_scale.is_cpu and output_scale.shape in SINGLE
    if taken and is_dynamo_compiling():
        fits = not (is_causal and attn_mask is not None)
        taken = fits and _fit(query, key, value, attn_mask, enable_gqa)
    if taken:
        try:
            return _attend_quantized(  # type: ignore[no-any-return]
                query, key, value, output_scale, attn_mask, is_causal, scale, enable_gqa
            )
        except REFUSED:
            pass
    return quantized_form.native(
        query, key, value, output_scale, attn_mask, is_causal, scale, enable_gqa, dtype
    )


def _fit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool) -> bool:
    arguments = {"query": query, "key": key, "value": value, "attn_mask": mask}
    if refusal(form.name, arguments) or not (2 + grouped <= query.dim() <= 4):
        return False
    batch = query.shape[: -3 if grouped else -2]
    alike = (
        key.shape[:-1] == value.shape[:-1]
        and key.shape[: len(batch)] == batch
        and key.dim() == query.dim()
    )
    if (
        not alike
        or query.shape[-1] != key.shape[-1]
        or not all(x.numel() for x in (query, key, value))
    ):
        return False
    if grouped and query.shape[-3] % key.shape[-3]:
        return False
    scores = (*query.shape[:-1], key.shape[-2])
    return mask is None or (
        mask.dim() <= len(scores)
        and all(size in (1, to) for size, to in zip(mask.shape[::-1], scores[::-1], strict=False))
    )


_attend = op("scaled_dot_product_attention")
_attend_quantized = op("scaled_dot_product_attention_quant_fp8_static")
