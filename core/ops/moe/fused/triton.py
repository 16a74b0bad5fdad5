"""Triton kernels for experts. Their maths and arguments are in ``functional``.

Pairs of a token and a choice are sorted by expert, and a program takes a block of pairs of one expert: it finds the
expert by bisection, so that the host waits for no count. The first product reads the rows of tokens where they lie and
applies the activation before it stores. The second puts its rows back in the order of pairs, and what each token's are
is summed in the order of its choices: the same sum whatever else is in the batch.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from opgraft.ops.activation.triton import gated, tile_at
from opgraft.ops.moe.fused import functional as definitions
from opgraft.ops.triton_launch import Tile, as_rows, launch, power_of_two, replaces, tile_of
from opgraft.ops.triton_segments import block_of_segment, blocks_at_most
from torch import Tensor

__all__ = ["fused_experts"]

COLUMNS = 64
"""Columns of a product that a program computes."""

DEPTH_BYTES = 128
"""Bytes of a row that are multiplied at a time: a line of the cache."""


@triton.jit
def _product(x, x_exists, weight, weight_exists, depth, stride, tile_depth: tl.constexpr):
    """Multiply rows of ``x`` by rows of a weight, ``depth`` elements each, those of the weight ``stride`` apart."""
    total = tl.zeros((x.shape[0], weight.shape[0]), tl.float32)
    for start in range(0, depth, tile_depth):
        element = start + tl.arange(0, tile_depth)[None, :]
        rows = tl.load(x + element, x_exists & (element < depth), 0.0)
        weights = tl.load(
            weight + element.to(tl.int64) * stride, weight_exists & (element < depth), 0.0
        )
        total = tl.dot(rows, tl.trans(weights), total, input_precision="ieee")
    return total


@triton.jit
def _rounded(t, bias, place, exists, dtype: tl.constexpr, has_bias: tl.constexpr):
    """Add a bias to a product, and round it to ``dtype`` as a product of that dtype is."""
    if has_bias:
        t += tl.load(bias + place, exists, 0.0).to(tl.float32)
    return t.to(dtype).to(tl.float32)


@triton.jit
def gate_up_kernel(
    x,
    w13,
    bias,
    order,
    bounds,
    hidden,
    experts,
    choices,
    depth,
    width,
    x_stride,
    expert_stride,
    row_stride,
    element_stride,
    function: tl.constexpr,
    has_bias: tl.constexpr,
    tile_depth: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Multiply by rows of the gate and of up in turn, so that both of an element are in one thread."""
    tiles = tl.cdiv(width, tile_columns)
    expert, first, end = block_of_segment(tl.program_id(0) // tiles, bounds, experts, tile_rows)
    if first >= end:
        return
    start, place = tl.program_id(0) % tiles * tile_columns, first + tl.arange(0, tile_rows)[:, None]
    token = tl.load(order + place, place < end, 0) // choices
    both = 2 * start + tl.arange(0, 2 * tile_columns)[:, None]
    row = both if function == "swigluoai" else both // 2 + both % 2 * width
    w13 += expert.to(tl.int64) * expert_stride + row.to(tl.int64) * row_stride
    t = _product(
        x + token * x_stride, place < end, w13, both < 2 * width, depth, element_stride, tile_depth
    )
    bias += expert * 2 * width
    t = _rounded(t, bias, tl.trans(row), tl.trans(both) < 2 * width, x.dtype.element_ty, has_bias)
    gate, up = tl.split(tl.reshape(t, (tile_rows, tile_columns, 2)))
    t = gated(gate, up, function, 1.702, 7.0, x.dtype.element_ty)
    column = start + tl.arange(0, tile_columns)[None, :]
    tl.store(
        hidden + place * width + column,
        t.to(hidden.dtype.element_ty),
        (place < end) & (column < width),
    )


@triton.jit
def down_kernel(
    hidden,
    w2,
    bias,
    order,
    bounds,
    outputs,
    experts,
    depth,
    width,
    expert_stride,
    row_stride,
    element_stride,
    has_bias: tl.constexpr,
    tile_depth: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    tiles = tl.cdiv(width, tile_columns)
    expert, first, end = block_of_segment(tl.program_id(0) // tiles, bounds, experts, tile_rows)
    if first >= end:
        return
    place = first + tl.arange(0, tile_rows)[:, None]
    row = tl.program_id(0) % tiles * tile_columns + tl.arange(0, tile_columns)[:, None]
    w2 += expert.to(tl.int64) * expert_stride + row.to(tl.int64) * row_stride
    t = _product(
        hidden + place * depth, place < end, w2, row < width, depth, element_stride, tile_depth
    )
    column = tl.trans(row)
    t = _rounded(
        t, bias + expert * width, column, column < width, hidden.dtype.element_ty, has_bias
    )
    pair = tl.load(order + place, place < end, 0)
    tl.store(
        outputs + pair * width + column,
        t.to(outputs.dtype.element_ty),
        (place < end) & (column < width),
    )


@triton.jit(do_not_specialize=["rows"])
def weighted_sum_kernel(
    outputs,
    weights,
    ids,
    out,
    rows,
    width,
    choices,
    experts,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Sum what the experts of a token made of it, by its weights; an expert elsewhere made nothing."""
    row, column, inside = tile_at(tl.program_id(0), rows, width, tile_rows, tile_columns)
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for choice in range(choices):
        pair = row * choices + choice
        expert = tl.load(ids + pair, row < rows, -1)
        here = (expert >= 0) & (expert < experts)
        t = tl.load(outputs + pair * width + column, inside & here, 0.0).to(tl.float32)
        weight = tl.load(weights + pair, row < rows, 0.0).to(tl.float32)
        total += tl.where(here, weight * t, 0.0)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), inside)


def _tile(pairs: int, experts: int, width: int) -> Tile:
    """Return a tile for the pairs of one expert: a small one where experts have few."""
    return Tile(16 if pairs <= 16 * experts else 64, max(16, power_of_two(width, COLUMNS)), 4)


@replaces(definitions.fused_experts)
def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    definitions.expect_experts(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    if not (x.numel() and w2.numel() and topk_ids.numel() and x.dtype == w13.dtype == w2.dtype):
        # Which has a result for nothing, and mixes dtypes as autocast does.
        return definitions.fused_experts.native(
            x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias
        )
    ids, order = topk_ids.flatten().sort(stable=True)
    bounds = torch.searchsorted(
        ids, torch.arange(w13.shape[0] + 1, dtype=ids.dtype, device=ids.device)
    )
    hidden = _gate_up(x, w13, w13_bias, order, bounds, activation)
    outputs = _down(hidden, w2, w2_bias, order, bounds)
    out, tile = x.new_empty(x.shape), tile_of(x.shape[1], 1024, 1024)
    programs = triton.cdiv(x.shape[0], tile.rows) * triton.cdiv(x.shape[1], tile.columns)
    operands = (
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        out,
        *x.shape,
        topk_ids.shape[1],
        w13.shape[0],
    )
    launch(weighted_sum_kernel, programs, tile, outputs, *operands)
    return out


def _gate_up(
    x: Tensor, w13: Tensor, bias: Tensor | None, order: Tensor, bounds: Tensor, activation: str
) -> Tensor:
    """Compute what is between the two products, ``[pairs, intermediate_size]``, sorted by expert."""
    (experts, both, depth), pairs = w13.shape, order.shape[0]
    width, rows = both // 2, as_rows(x, depth)
    tile, hidden = _tile(pairs, experts, width), x.new_empty(pairs, width)
    # No bias is read if there is none.
    operands = (
        w13,
        x if bias is None else bias.contiguous(),
        order,
        bounds,
        hidden,
    )
    sizes = (experts, pairs // x.shape[0], depth, width, rows.stride(0), *w13.stride())
    constants = {
        "function": activation,
        "has_bias": bias is not None,
        "tile_depth": DEPTH_BYTES // x.element_size(),
    }
    programs = blocks_at_most(pairs, experts, tile.rows) * triton.cdiv(width, tile.columns)
    launch(gate_up_kernel, programs, tile, rows, *operands, *sizes, **constants)
    return hidden


def _down(hidden: Tensor, w2: Tensor, bias: Tensor | None, order: Tensor, bounds: Tensor) -> Tensor:
    """Compute the outputs of experts in the order of pairs, ``[pairs, hidden_size]``."""
    (experts, width, depth), pairs = w2.shape, order.shape[0]
    tile, outputs = _tile(pairs, experts, width), hidden.new_empty(pairs, width)
    operands = (w2, hidden if bias is None else bias.contiguous(), order, bounds, outputs)
    constants = {"has_bias": bias is not None, "tile_depth": DEPTH_BYTES // hidden.element_size()}
    programs = blocks_at_most(pairs, experts, tile.rows) * triton.cdiv(width, tile.columns)
    launch(
        down_kernel,
        programs,
        tile,
        hidden,
        *operands,
        experts,
        depth,
        width,
        *w2.stride(),
        **constants,
    )
    return outputs
