"""Collectives with what follows or precedes them: norms, quantised too, and linear maps.

Each is what its name says, one after the other. ``all_reduce_rms_norm`` sums ``x`` over the ranks of a group, rounds to
its dtype, adds a residual, and norms that sum (arXiv:1909.08053), which is quantised (arXiv:2209.05433,
arXiv:2509.25149). Of what is computed for parts of the rows (arXiv:2205.05198), each rank has as many of the first
dimension, the last ones padded with zeros. A kernel may round once, and send what is done while it computes the rest.
Every rank calls with the same shapes. A rank that is alone exchanges nothing. No gradients.
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


def _summed(x: Tensor, kind: str) -> Tensor:
    """Sum over the ranks of a group, into new memory; by the registered op, which whoever traces this sees."""
    expect_choice("all_reduce", "kind", kind, KINDS)
    if parallelism().groups[kind].communicator is None:
        return x.clone()
    summed: Tensor = torch.ops.opgraft.all_reduce(x, kind)
    return summed


@register_functional("rms_norm", pair_like, differentiable=False)
def all_reduce_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, kind: str = "tensor"
) -> tuple[Tensor, Tensor]:
    """Compute the sum of ``x`` over ranks and of ``residual``, and its ``rms_norm`` (arXiv:1909.08053, section 3).

    Args:
        x: ``[..., hidden_size]``, the part of this rank.
        residual: the same, whole on every rank; nothing is added without one.
        weight: ``[hidden_size]``.
        eps: added to the mean square.
        kind: of the group that sums.

    Returns:
        The norm, and the sum in the dtype of ``x``.

    Raises:
        ValueError: as ``fused_add_rms_norm`` does, or there is no such kind of group.
    """
    summed = _summed(x, kind)
    if residual is None:
        return rms_norm.native(summed, weight, eps), summed
    return fused_add_rms_norm.native(summed, residual, weight, eps)


@register_functional("gemma_rms_norm", pair_like, differentiable=False)
def all_reduce_gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, kind: str = "tensor"
) -> tuple[Tensor, Tensor]:
    """Compute what ``all_reduce_rms_norm`` does with Gemma's norm (arXiv:2403.08295).

    Raises:
        ValueError: as ``fused_add_gemma_rms_norm`` does, or there is no such kind of group.
    """
    summed = _summed(x, kind)
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
    return quant_fp8_static.fake(x, scale, group_shape, dtype), x.new_empty(x.shape)


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
    """Compute ``all_reduce_rms_norm`` with its norm quantised by ``quant_fp8_static`` (arXiv:2209.05433).

    Raises:
        ValueError: as either does.
    """
    normed, summed = all_reduce_rms_norm.native(x, residual, weight, eps, kind)
    return quant_fp8_static.native(normed, scale, group_shape, dtype), summed


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
    return *quant_fp8_dynamic.fake(x, group_shape, scale_ub, use_ue8m0, dtype), x.new_empty(x.shape)


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
    """Compute ``all_reduce_rms_norm`` with its norm quantised by ``quant_fp8_dynamic`` (arXiv:2209.05433).

    Returns:
        The quantised norm, its scales, and the sum in the dtype of ``x``.

    Raises:
        ValueError: as either does.
    """
    normed, summed = all_reduce_rms_norm.native(x, residual, weight, eps, kind)
    return *quant_fp8_dynamic.native(normed, group_shape, scale_ub, use_ue8m0, dtype), summed


def _fake_fp4(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    eps: float,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor, Tensor]:
    return *quant_fp4.fake(x, scale), x.new_empty(x.shape)


@register_functional("rms_norm", _fake_fp4, differentiable=False)
def all_reduce_rms_norm_quant_fp4(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    eps: float,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``all_reduce_rms_norm`` with its norm quantised by ``quant_fp4`` (arXiv:2509.25149, arXiv:2310.10537).

    Returns:
        The quantised norm, the scales of its groups, and the sum in the dtype of ``x``.

    Raises:
        ValueError: as either does.
    """
    normed, summed = all_reduce_rms_norm.native(x, residual, weight, eps, kind)
    return *quant_fp4.native(normed, scale), summed


def _expect_rows(op: str, x: Tensor, world_size: int, kind: str) -> None:
    expect_choice(op, "kind", kind, KINDS)
    ranks = parallelism().groups[kind].world_size
    if world_size != ranks:
        raise ValueError(
            f"{op}: world_size is {world_size}, expected {ranks}, the ranks of the group {kind!r}"
        )
    if x.dim() < 2:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected [rows, ..., in_features]")


def _fake_scattered(
    x: Tensor, weight: Tensor, bias: Tensor | None, world_size: int, kind: str = "tensor"
) -> Tensor:
    rows = (x.shape[0] + world_size - 1) // world_size
    return x.new_empty((rows, *x.shape[1:-1], weight.shape[0]))


@register_functional("linear", _fake_scattered, differentiable=False)
def linear_reduce_scatter_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, world_size: int, kind: str = "tensor"
) -> Tensor:
    """Compute ``linear(x, weight, bias)``, summed over ranks, of which each has a part of the rows (arXiv:2205.05198).

    Args:
        x: ``[rows, ..., in_features]``, the part of this rank of all features.
        weight: ``[out_features, in_features]``, likewise.
        bias: ``[out_features]``; of one rank, as all are summed.
        world_size: of the group, as whoever traces this must know it.
        kind: of the group.

    Returns:
        ``[ceil(rows / world_size), ..., out_features]``.

    Raises:
        ValueError: as ``linear`` does; there is no such kind of group, or it has another size; or ``x`` has no rows.
    """
    _expect_rows("linear_reduce_scatter_rows", x, world_size, kind)
    mapped = linear.native(x, weight, bias)
    if parallelism().groups[kind].communicator is None:
        return mapped
    part: Tensor = torch.ops.opgraft.reduce_scatter_rows(mapped, world_size, kind)
    return part


def _fake_gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, world_size: int, kind: str = "tensor"
) -> Tensor:
    return x.new_empty((rows, *x.shape[1:-1], weight.shape[0]))


@register_functional("linear", _fake_gathered, differentiable=False)
def all_gather_rows_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, world_size: int, kind: str = "tensor"
) -> Tensor:
    """Compute ``linear(x, weight, bias)`` of the rows of all ranks (arXiv:2205.05198).

    Args:
        x: ``[ceil(rows / world_size), ..., in_features]``, the rows of this rank.
        weight: ``[out_features, in_features]``, which ranks may have parts of.
        bias: ``[out_features]``, likewise.
        rows: of all ranks, without those that were padded.
        world_size: of the group, as whoever traces this must know it.
        kind: of the group.

    Returns:
        ``[rows, ..., out_features]``.

    Raises:
        ValueError: as ``linear_reduce_scatter_rows`` does.
    """
    _expect_rows("all_gather_rows_linear", x, world_size, kind)
    if parallelism().groups[kind].communicator is not None:
        x = torch.ops.opgraft.all_gather_rows(x, rows, world_size, kind)
    return linear.native(x.narrow(0, 0, rows), weight, bias)
