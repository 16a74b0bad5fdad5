"""Norms and linear maps together with collectives of a group of ranks.

A form computes its parts one after the other, in the order of its name. ``all_reduce_rms_norm``
sums ``x`` over the ranks of a group, rounds the sum to its dtype, adds a residual, and norms the
result (arXiv:1909.08053). Other forms quantise the norm (arXiv:2209.05433, arXiv:2509.25149). With
parts of rows (arXiv:2205.05198), each rank has equally many rows of the first dimension; zeros fill
up the last part.

A kernel may round once, and may send finished parts while it computes the rest. Every rank calls
with the same shapes. A rank alone exchanges nothing. The forms have no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft.binding.functional import register_functional
from opgraft.distributed.groups import parallelism
from opgraft.distributed.layout import KINDS
from opgraft.ops.checks import expect_choice
from opgraft.ops.layernorm.functional import (
    fused_add_gemma_rms_norm,
    fused_add_rms_norm,
    gemma_rms_norm,
    pair_like,
    rms_norm,
)
from opgraft.ops.linear.functional import linear
from opgraft.ops.quantization.fp4 import quant_fp4
from opgraft.ops.quantization.functional import quant_fp8_dynamic, quant_fp8_static
from torch import Tensor

__all__ = [
    "all_gather_rows_linear",
    "all_reduce_gemma_rms_norm",
    "all_reduce_rms_norm",
    "all_reduce_rms_norm_quant_fp4",
    "all_reduce_rms_norm_quant_fp8_dynamic",
    "all_reduce_rms_norm_quant_fp8_static",
    "linear_reduce_scatter_rows",
]

FP8 = torch.float8_e4m3fn


def _sum_over_ranks(x: Tensor, kind: str) -> Tensor:
    """Return the sum over the ranks of a group, in new memory."""
    expect_choice("all_reduce", "kind", kind, KINDS)
    if parallelism().groups[kind].communicator is None:
        return x.clone()
    # A graph needs the registered op: a tracer cannot look into a communicator.
    summed: Tensor = torch.ops.opgraft.all_reduce(x, kind)
    return summed


@register_functional("rms_norm", pair_like, differentiable=False)
def all_reduce_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, kind: str = "tensor"
) -> tuple[Tensor, Tensor]:
    """Sum ``x`` over ranks, add ``residual``, and compute ``rms_norm`` (arXiv:1909.08053).

    Args:
        x: ``[..., hidden_size]``, the part of this rank.
        residual: like ``x``, whole on every rank; optional.
        weight: ``[hidden_size]``.
        eps: added to the mean square.
        kind: the kind of the group of ranks.

    Returns:
        The norm, and the sum in the dtype of ``x``.

    Raises:
        ValueError: ``fused_add_rms_norm`` raises, or there is no such kind of group.
    """
    summed = _sum_over_ranks(x, kind)
    if residual is None:
        return rms_norm.native(summed, weight, eps), summed
    return fused_add_rms_norm.native(summed, residual, weight, eps)


@register_functional("gemma_rms_norm", pair_like, differentiable=False)
def all_reduce_gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, kind: str = "tensor"
) -> tuple[Tensor, Tensor]:
    """Compute ``all_reduce_rms_norm`` with Gemma's norm (arXiv:2403.08295).

    Raises:
        ValueError: ``fused_add_gemma_rms_norm`` raises, or there is no such kind of group.
    """
    summed = _sum_over_ranks(x, kind)
    if residual is None:
        return gemma_rms_norm.native(summed, weight, eps), summed
    return fused_add_gemma_rms_norm.native(summed, residual, weight, eps)


def _fake_static(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor]:
    # A norm keeps shape and dtype, so the rule of quantisation takes ``x`` itself.
    quantised = quant_fp8_static.fake(x, scale, group_shape, dtype)
    return quantised, x.new_empty(x.shape)


@register_functional("rms_norm", _fake_static, differentiable=False)
def all_reduce_rms_norm_quant_fp8_static(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor]:
    """Compute ``all_reduce_rms_norm``, and quantise by ``quant_fp8_static`` (arXiv:2209.05433).

    Returns:
        The quantised norm, and the sum in the dtype of ``x``.

    Raises:
        ValueError: ``all_reduce_rms_norm`` or ``quant_fp8_static`` raises.
    """
    normed, summed = all_reduce_rms_norm.native(x, residual, weight, eps, kind)
    quantised = quant_fp8_static.native(normed, scale, group_shape, dtype)
    return quantised, summed


def _fake_dynamic(
    x: Tensor,
    residual: Tensor | None,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor, Tensor]:
    # A norm keeps shape and dtype, so the rule of quantisation takes ``x`` itself.
    quantised, scales = quant_fp8_dynamic.fake(x, group_shape, scale_ub, use_ue8m0, dtype)
    return quantised, scales, x.new_empty(x.shape)


@register_functional("rms_norm", _fake_dynamic, differentiable=False)
def all_reduce_rms_norm_quant_fp8_dynamic(
    x: Tensor,
    residual: Tensor | None,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``all_reduce_rms_norm``, and quantise by ``quant_fp8_dynamic`` (arXiv:2209.05433).

    Returns:
        The quantised norm, the scales, and the sum in the dtype of ``x``.

    Raises:
        ValueError: ``all_reduce_rms_norm`` or ``quant_fp8_dynamic`` raises.
    """
    normed, summed = all_reduce_rms_norm.native(x, residual, weight, eps, kind)
    quantised, scales = quant_fp8_dynamic.native(normed, group_shape, scale_ub, use_ue8m0, dtype)
    return quantised, scales, summed


def _fake_fp4(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    eps: float,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor, Tensor]:
    # A norm keeps shape and dtype, so the rule of quantisation takes ``x`` itself.
    quantised, scales = quant_fp4.fake(x, scale)
    return quantised, scales, x.new_empty(x.shape)


@register_functional("rms_norm", _fake_fp4, differentiable=False)
def all_reduce_rms_norm_quant_fp4(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    eps: float,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``all_reduce_rms_norm``, and quantise by ``quant_fp4``.

    The sources of the quantization are arXiv:2509.25149 and arXiv:2310.10537.

    Returns:
        The quantised norm, the scales of groups, and the sum in the dtype of ``x``.

    Raises:
        ValueError: ``all_reduce_rms_norm`` or ``quant_fp4`` raises.
    """
    normed, summed = all_reduce_rms_norm.native(x, residual, weight, eps, kind)
    quantised, scales = quant_fp4.native(normed, scale)
    return quantised, scales, summed


def _expect_rows(op: str, x: Tensor, world_size: int, kind: str) -> None:
    expect_choice(op, "kind", kind, KINDS)
    ranks = parallelism().groups[kind].world_size
    if world_size != ranks:
        raise ValueError(
            f"{op}: world_size is {world_size}, expected {ranks}, the ranks of the group {kind!r}"
        )
    if x.dim() < 2:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected [rows, ..., in_features]")


def _fake_part_of_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, world_size: int, kind: str = "tensor"
) -> Tensor:
    # Rounded up: zeros fill up the last part.
    rows = (x.shape[0] + world_size - 1) // world_size
    return x.new_empty((rows, *x.shape[1:-1], weight.shape[0]))


@register_functional("linear", _fake_part_of_rows, differentiable=False)
def linear_reduce_scatter_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, world_size: int, kind: str = "tensor"
) -> Tensor:
    """Sum ``linear(x, weight, bias)`` over ranks, and return this rank's rows (arXiv:2205.05198).

    Args:
        x: ``[rows, ..., in_features]``, this rank's part of the features.
        weight: ``[out_features, in_features]``, this rank's part of the features.
        bias: ``[out_features]``, on one rank only, because the ranks are summed.
        world_size: the number of ranks, as a graph needs the number for shapes.
        kind: the kind of the group of ranks.

    Returns:
        ``[ceil(rows / world_size), ..., out_features]``.

    Raises:
        ValueError: ``linear`` raises; there is no such kind of group, or the group has another
            size; or ``x`` has no rows.
    """
    _expect_rows("linear_reduce_scatter_rows", x, world_size, kind)
    # Only one rank has a bias, so the sum over ranks adds the bias once.
    mapped = linear.native(x, weight, bias)
    if parallelism().groups[kind].communicator is None:
        # A rank alone has all rows.
        return mapped
    part: Tensor = torch.ops.opgraft.reduce_scatter_rows(mapped, world_size, kind)
    return part


def _fake_all_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, world_size: int, kind: str = "tensor"
) -> Tensor:
    return x.new_empty((rows, *x.shape[1:-1], weight.shape[0]))


@register_functional("linear", _fake_all_rows, differentiable=False)
def all_gather_rows_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, world_size: int, kind: str = "tensor"
) -> Tensor:
    """Compute ``linear(x, weight, bias)`` for the rows of all ranks (arXiv:2205.05198).

    Args:
        x: ``[ceil(rows / world_size), ..., in_features]``, the rows of this rank.
        weight: ``[out_features, in_features]``, whole or this rank's part.
        bias: ``[out_features]``, whole or this rank's part.
        rows: the rows of all ranks, without the zeros that fill up the last part.
        world_size: the number of ranks, as a graph needs the number for shapes.
        kind: the kind of the group of ranks.

    Returns:
        ``[rows, ..., out_features]``.

    Raises:
        ValueError: as ``linear_reduce_scatter_rows``.
    """
    _expect_rows("all_gather_rows_linear", x, world_size, kind)
    if parallelism().groups[kind].communicator is not None:
        x = torch.ops.opgraft.all_gather_rows(x, rows, world_size, kind)
    return linear.native(x.narrow(0, 0, rows), weight, bias)
