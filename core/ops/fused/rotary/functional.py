"""The norm of each head of query and key (Dehghani et al., arXiv:2302.05442), and their rotation by position."""

from __future__ import annotations

from typing import Any

from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_floating, expect_positive, expect_same_dtype
from opgraft.ops.layernorm.functional import gemma_rms_norm, rms_norm
from opgraft.ops.precision import compute_dtype
from opgraft.ops.rotary.functional import like_query_and_key, rotary_embedding
from torch import Tensor

__all__ = ["qk_norm_rope"]


@register_functional("RotaryEmbedding", like_query_and_key)
def qk_norm_rope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    is_neox_style: bool = True,
    one_plus_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise each head of query and key, and rotate them by their positions (arXiv:2302.05442, arXiv:2104.09864).

    That is ``rotary_embedding`` of what ``rms_norm`` makes of the heads. Half types are computed in float32 and rounded
    once, and not in between.

    Args:
        positions: integers ``[num_tokens]`` or ``[batch, sequence]``, rows of the table.
        query: for each position ``heads · head_size`` elements, or ``[heads, head_size]``.
        key: likewise, with a number of heads of its own.
        head_size: elements of a head.
        cos_sin_cache: ``[positions, rotary_dim]``: cosines, then sines.
        query_weight: ``[head_size]``, of the norm of the query's heads.
        key_weight: the same for the key's.
        eps: added to the mean squares.
        is_neox_style: pair the halves of the rotated part; otherwise even elements with odd ones.
        one_plus_weight: the norms are ``gemma_rms_norm``, which multiplies by one plus the weight.

    Raises:
        ValueError: as ``rotary_embedding`` or the norm does.
    """
    expect_positive("qk_norm_rope", "head_size", head_size)
    expect_same_dtype("qk_norm_rope", "key", key, "query", query)
    norm = gemma_rms_norm.native if one_plus_weight else rms_norm.native
    normed = _normed(norm, "query", query, head_size, query_weight, eps)
    normed_key = _normed(norm, "key", key, head_size, key_weight, eps)
    table = head_size, cos_sin_cache, is_neox_style
    turned, turned_key = rotary_embedding.native(positions, normed, normed_key, *table)
    return turned.to(query.dtype), turned_key.to(key.dtype)


def _normed(
    norm: Any, argument: str, x: Tensor, head_size: int, weight: Tensor, eps: float
) -> Tensor:
    """Normalise heads, and leave them in the dtype in which they are computed."""
    expect_floating("qk_norm_rope", argument, x)
    if not x.dim() or x.shape[-1] % head_size:
        raise ValueError(
            f"qk_norm_rope: {argument} has shape {tuple(x.shape)}, expected a last dimension that is a multiple of "
            f"head_size={head_size}"
        )
    dtype = compute_dtype(x.dtype)
    heads = x.to(dtype).reshape(*x.shape[:-1], x.shape[-1] // head_size, head_size)
    normed: Tensor = norm(heads, weight.to(dtype), eps).reshape(x.shape)
    return normed
