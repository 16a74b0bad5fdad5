"""The spec of normalised and rotated heads, made from the spec of the rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opgraft.ops.fused.rotary.functional import qk_norm_rope
from opgraft.ops.rotary import spec as rotary
from opgraft.ops.spec import Arguments, Draw, OpSpec
from torch import Tensor

(ROTARY,) = (spec for spec in rotary.SPECS if spec.functional.name == "rotary_embedding")


def _rotary_inputs(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    # The weights take the size of a head, not of a row.
    weights = {"query_weight": draw(head_size), "key_weight": draw(head_size)}
    return {**ROTARY.inputs(draw, lead, head_size), **weights, "eps": 1e-5}


def _normed(x: Tensor, head_size: int, weight: Tensor, eps: float) -> Tensor:
    heads = x.reshape(-1, head_size)
    mean = (heads * heads).sum(-1, keepdim=True) / head_size
    normed = heads / (mean + eps).sqrt()
    return (normed * weight).reshape(x.shape)


def _normed_and_rotated(
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
) -> Any:
    if one_plus_weight:
        query_weight = 1 + query_weight
        key_weight = 1 + key_weight
    query = _normed(query, head_size, query_weight, eps)
    key = _normed(key, head_size, key_weight, eps)
    return ROTARY.reference(positions, query, key, head_size, cos_sin_cache, is_neox_style)


def _flops(query: Tensor, key: Tensor, **others: Any) -> int:
    return 7 * (query.numel() + key.numel())


SPECS = (
    OpSpec(
        qk_norm_rope,
        _rotary_inputs,
        _normed_and_rotated,
        variants={**rotary.STYLES, "gemma": {"one_plus_weight": True}},
        **{**rotary.HEADS, "flops": _flops},
    ),
)
