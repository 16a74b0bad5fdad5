"""Attention over all keys at once, without dropout, in float32.

In half types zentorch rounds once more than the definition.
"""

from __future__ import annotations

import torch
from opgraft.functional import scaled_dot_product_attention as form
from torch import Tensor

from opgraft_zentorch.library import OPERATORS, is_plain


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
    taken = _alike(query, key, value) and _heads_fit(query, key, enable_gqa)
    if dropout_p:
        taken = False
    if taken and attn_mask is not None:
        taken = not is_causal and _mask_fits(attn_mask, query, key)
    if not taken:
        return form.native(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    # The other overload returns a second tensor, and zentorch writes nothing to its memory.
    out = query.new_empty(query.shape)
    OPERATORS.zentorch_sdpa.out(
        _in_rows(query),
        _in_rows(key),
        _in_rows(value),
        0.0,
        is_causal,
        attn_mask=_in_numbers(attn_mask),
        scale=scale,
        out=out,
    )
    return out


def _in_rows(x: Tensor) -> Tensor:
    """Return a tensor whose rows lie one behind another, each without gaps.

    If a single row has a smaller stride than its length, torch ignores the stride. zentorch's
    result is then wrong.
    """
    if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _in_numbers(mask: Tensor | None) -> Tensor | None:
    """Return a mask that is added to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    added = torch.zeros_like(mask, dtype=torch.float32)
    return added.masked_fill_(~mask, float("-inf"))


def _alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True for tensors of four dimensions, with as many keys as values."""
    for each in (query, key, value):
        if not is_plain(each, torch.float32):
            return False
        # Without numbers, there is nothing to sum.
        if each.dim() != 4 or not each.numel():
            return False
    # The operator refuses values of another width than the keys.
    return value.shape == key.shape


def _mask_fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Return True if the mask has a dtype of the operator, and broadcasts to the scores."""
    if mask.dtype not in (torch.bool, torch.float32):
        return False
    if not is_plain(mask, mask.dtype):
        return False
    # The operator takes no other number of dimensions.
    dims = mask.dim()
    if dims not in (2, 4):
        return False
    keys = key.shape[-2]
    scores = (*query.shape[:-1], keys)
    pairs = zip(mask.shape, scores[-dims:], strict=True)
    return all(size in (1, wanted) for size, wanted in pairs)


def _heads_fit(query: Tensor, key: Tensor, grouped: bool) -> bool:
    """Return True if batches and head sizes agree, and each head of keys has its queries."""
    batch, heads, _, size = query.shape
    sequences, groups, _, width = key.shape
    if sequences != batch:
        return False
    if width != size:
        return False
    if groups == heads:
        return True
    # zentorch shares heads without being asked, and torch refuses.
    return grouped and heads % groups == 0
