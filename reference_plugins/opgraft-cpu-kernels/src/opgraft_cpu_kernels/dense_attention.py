"""Attention over all keys at once, without dropout.

The kernel takes query, key and value of at most four dimensions. In all other cases opgraft's
native definition runs, which is torch's function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    """Compute ``opgraft.functional.scaled_dot_product_attention``."""
    taken = query.dtype in DTYPES and query.is_cpu
    # Compiled code cannot catch the error of an op. So it asks for all arguments beforehand.
    if taken and is_dynamo_compiling():
        fits = dropout_p == 0 and not (is_causal and attn_mask is not None)
        taken = fits and _fit(query, key, value, attn_mask, enable_gqa)
    if taken:
        try:
            return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
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
    """Compute ``opgraft.functional.scaled_dot_product_attention_quant_fp8_static``."""
    by_one_scale = output_scale.is_cpu and output_scale.shape in SINGLE
    taken = query.dtype in DTYPES and query.is_cpu and dtype is FP8 and by_one_scale
    if taken and is_dynamo_compiling():
        fits = not (is_causal and attn_mask is not None)
        taken = fits and _fit(query, key, value, attn_mask, enable_gqa)
    if taken:
        try:
            return _attend_quantized(
                query, key, value, output_scale, attn_mask, is_causal, scale, enable_gqa
            )
        except REFUSED:
            pass
    return quantized_form.native(
        query, key, value, output_scale, attn_mask, is_causal, scale, enable_gqa, dtype
    )


def _fit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool) -> bool:
    """Return True if the kernel takes these dtypes, devices and shapes.

    Args:
        query: ``[batch, heads, queries, size]``, or without the first dimensions.
        key: ``[batch, heads, keys, size]``.
        value: ``[batch, heads, keys, width]``.
        mask: broadcast to ``[batch, heads, queries, keys]``.
        grouped: whether several heads of ``query`` share a head of ``key``.
    """
    given = {"query": query, "key": key, "value": value, "attn_mask": mask}
    if refusal(form.name, given):
        return False
    least_dims = 3 if grouped else 2
    if not least_dims <= query.dim() <= 4 or key.dim() != query.dim():
        return False
    if key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
        return False
    # The heads count as a part of the batch, unless their numbers may differ.
    batch = query.shape[: -3 if grouped else -2]
    if key.shape[: len(batch)] != batch:
        return False
    if not all(x.numel() for x in (query, key, value)):
        return False
    if grouped and query.shape[-3] % key.shape[-3]:
        return False
    return mask is None or _broadcasts(mask, (*query.shape[:-1], key.shape[-2]))


def _broadcasts(mask: Tensor, shape: Sequence[int]) -> bool:
    if mask.dim() > len(shape):
        return False
    pairs = zip(mask.shape[::-1], shape[::-1], strict=False)
    return all(size in (1, wanted) for size, wanted in pairs)


_attend: Callable[..., Tensor] = op("scaled_dot_product_attention")
_attend_quantized: Callable[..., Tensor] = op("scaled_dot_product_attention_quant_fp8_static")
