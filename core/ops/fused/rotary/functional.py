"""The norm of each head of query and key, and the rotation of the heads by position.

The source of the norm is Dehghani et al., arXiv:2302.05442.
"""

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
    """Normalise the heads of query and key, and rotate them (arXiv:2302.05442, arXiv:2104.09864).

    The form computes ``rms_norm`` of each head, then ``rotary_embedding``. Half types are computed
    in float32 and rounded once, at the end.

    Args:
        positions: integers ``[num_tokens]`` or ``[batch, sequence]``, rows of the table.
        query: ``heads · head_size`` elements for each position, or ``[heads, head_size]``.
        key: like ``query``, with another number of heads if needed.
        head_size: elements of a head.
        cos_sin_cache: the table, ``[positions, rotary_dim]``: cosines, then sines.
        query_weight: ``[head_size]``, the weight of the norm of query heads.
        key_weight: ``[head_size]``, the weight of the norm of key heads.
        eps: added to the mean squares.
        is_neox_style: True pairs the halves of the rotated part, False even elements with odd ones.
        one_plus_weight: True takes ``gemma_rms_norm``, with the factor ``1 + weight``.

    Raises:
        ValueError: ``rotary_embedding`` or the norm raises.
    """
    expect_positive("qk_norm_rope", "head_size", head_size)
    expect_same_dtype("qk_norm_rope", "key", key, "query", query)
    # The native definitions: the registered ops would be calls of their own inside of this op.
    norm = gemma_rms_norm.native if one_plus_weight else rms_norm.native
    normed_query = _normalise_heads(norm, "query", query, head_size, query_weight, eps)
    normed_key = _normalise_heads(norm, "key", key, head_size, key_weight, eps)

    turned_query, turned_key = rotary_embedding.native(
        positions, normed_query, normed_key, head_size, cos_sin_cache, is_neox_style
    )
    return turned_query.to(query.dtype), turned_key.to(key.dtype)


def _normalise_heads(
    norm: Any, argument: str, x: Tensor, head_size: int, weight: Tensor, eps: float
) -> Tensor:
    """Return normalised heads in the dtype of the computation."""
    expect_floating("qk_norm_rope", argument, x)
    if not x.dim() or x.shape[-1] % head_size:
        raise ValueError(
            f"qk_norm_rope: {argument} has shape {tuple(x.shape)}, expected a last dimension that "
            f"is a multiple of head_size={head_size}"
        )

    # Cast before the norm: the norm would round to the dtype of its input.
    dtype = compute_dtype(x.dtype)
    heads = x.to(dtype).reshape(*x.shape[:-1], x.shape[-1] // head_size, head_size)
    normed: Tensor = norm(heads, weight.to(dtype), eps).reshape(x.shape)
    return normed
