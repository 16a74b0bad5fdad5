"""Triton kernels for experts. The maths and the arguments are in ``functional``.

A pair is a token and one of its choices. Pairs are sorted by expert on the device. A program
computes a block of pairs of one expert, and finds the expert by bisection, so the host waits for no
count.

1. ``gate_up_kernel`` reads the rows of tokens in place, and stores activated products.
2. ``down_kernel`` stores the outputs in the order of pairs.
3. ``weighted_sum_kernel`` sums the outputs of a token in the order of choices. So the sum is the
   same in every batch.
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
"""The most columns of a product in one program."""

DEPTH_BYTES = 128
"""Bytes of a row for one step of a product: a line of the cache."""


@triton.jit
def _product(x, x_exists, weight, weight_exists, depth, stride, tile_depth: tl.constexpr):
    """Return ``x @ weight.T`` in float32 for pointers to rows of ``depth`` elements.

    The elements of ``x`` are adjacent, the elements of a weight ``stride`` apart.
    """
    total = tl.zeros((x.shape[0], weight.shape[0]), tl.float32)
    for start in range(0, depth, tile_depth):
        element = start + tl.arange(0, tile_depth)[None, :]
        inside = element < depth
        rows = tl.load(x + element, x_exists & inside, 0.0)
        # In int64, as the distance may exceed 2^31 elements.
        distance = element.to(tl.int64) * stride
        weights = tl.load(weight + distance, weight_exists & inside, 0.0)
        total = tl.dot(rows, tl.trans(weights), total, input_precision="ieee")
    return total


@triton.jit
def _rounded(t, bias, place, exists, dtype: tl.constexpr, has_bias: tl.constexpr):
    """Return a product plus its bias, rounded to ``dtype`` as a product of that dtype."""
    if has_bias:
        t += tl.load(bias + place, exists, 0.0).to(tl.float32)
    return t.to(dtype).to(tl.float32)


@triton.jit
def _block_of_program(bounds, experts, width, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """Return the expert, the first pair, the end of the expert's pairs, and the first column."""
    tiles = tl.cdiv(width, tile_columns)
    block = tl.program_id(0) // tiles
    expert, first, end = block_of_segment(block, bounds, experts, tile_rows)
    start = tl.program_id(0) % tiles * tile_columns
    return expert, first, end, start


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
    """Compute the product with gate and up, and the activation, for a block of one expert's pairs.

    The rows of gate and up alternate in the product, so one thread has both of an element.
    """
    expert, first, end, start = _block_of_program(bounds, experts, width, tile_rows, tile_columns)
    # The host launches as many blocks as any choice of experts may need.
    if first >= end:
        return

    place = first + tl.arange(0, tile_rows)[:, None]
    is_pair = place < end
    token = tl.load(order + place, is_pair, 0) // choices

    both = 2 * start + tl.arange(0, 2 * tile_columns)[:, None]
    # In a tile each gate stands next to its up, whatever their order in memory.
    row = both if function == "swigluoai" else both // 2 + both % 2 * width
    w13 += expert.to(tl.int64) * expert_stride + row.to(tl.int64) * row_stride

    x_row = x + token * x_stride
    t = _product(x_row, is_pair, w13, both < 2 * width, depth, element_stride, tile_depth)

    bias += expert * 2 * width
    t = _rounded(t, bias, tl.trans(row), tl.trans(both) < 2 * width, x.dtype.element_ty, has_bias)

    gate, up = tl.split(tl.reshape(t, (tile_rows, tile_columns, 2)))
    # 1.702 and 7.0 are alpha and limit of "swigluoai". Other functions ignore both.
    t = gated(gate, up, function, 1.702, 7.0, x.dtype.element_ty)
    column = start + tl.arange(0, tile_columns)[None, :]
    inside = is_pair & (column < width)
    tl.store(hidden + place * width + column, t.to(hidden.dtype.element_ty), inside)


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
    """Compute the product with down for a block of one expert's pairs."""
    expert, first, end, start = _block_of_program(bounds, experts, width, tile_rows, tile_columns)
    if first >= end:
        return

    place = first + tl.arange(0, tile_rows)[:, None]
    is_pair = place < end

    row = start + tl.arange(0, tile_columns)[:, None]
    w2 += expert.to(tl.int64) * expert_stride + row.to(tl.int64) * row_stride
    hidden_row = hidden + place * depth

    t = _product(hidden_row, is_pair, w2, row < width, depth, element_stride, tile_depth)
    column = tl.trans(row)
    bias += expert * width
    t = _rounded(t, bias, column, column < width, hidden.dtype.element_ty, has_bias)

    pair = tl.load(order + place, is_pair, 0)
    inside = is_pair & (column < width)
    tl.store(outputs + pair * width + column, t.to(outputs.dtype.element_ty), inside)


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
    """Sum the outputs of each token's experts by their weights, without experts elsewhere."""
    row, column, inside = tile_at(tl.program_id(0), rows, width, tile_rows, tile_columns)
    is_row = row < rows
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for choice in range(choices):
        pair = row * choices + choice
        expert = tl.load(ids + pair, is_row, -1)
        is_here = (expert >= 0) & (expert < experts)
        t = tl.load(outputs + pair * width + column, inside & is_here, 0.0).to(tl.float32)
        weight = tl.load(weights + pair, is_row, 0.0).to(tl.float32)
        # Not a product with zero: the weight of an expert elsewhere may be NaN.
        total += tl.where(is_here, weight * t, 0.0)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), inside)


def _tile(pairs: int, experts: int, width: int) -> Tile:
    """Return a tile for pairs of one expert: fewer rows if an expert has few pairs on average."""
    rows = 16 if pairs <= 16 * experts else 64
    # A product of tiles needs 16 columns.
    columns = max(16, power_of_two(width, COLUMNS))
    return Tile(rows, columns, warps=4)


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
    is_empty = not (x.numel() and w2.numel() and topk_ids.numel())
    # The definition handles empty tensors, and mixes dtypes as autocast does.
    if is_empty or not x.dtype == w13.dtype == w2.dtype:
        return definitions.fused_experts.native(
            x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias
        )

    tokens, width = x.shape
    experts = w13.shape[0]

    ids, order = topk_ids.flatten().sort(stable=True)
    edges = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device)
    bounds = torch.searchsorted(ids, edges)

    hidden = _gate_up(x, w13, w13_bias, order, bounds, activation)
    outputs = _down(hidden, w2, w2_bias, order, bounds)

    out = x.new_empty(x.shape)
    tile = tile_of(width, 1024, 1024)
    programs = triton.cdiv(tokens, tile.rows) * triton.cdiv(width, tile.columns)
    launch(
        weighted_sum_kernel,
        programs,
        tile,
        outputs,
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        out,
        tokens,
        width,
        topk_ids.shape[1],
        experts,
    )
    return out


def _gate_up(
    x: Tensor, w13: Tensor, bias: Tensor | None, order: Tensor, bounds: Tensor, activation: str
) -> Tensor:
    """Return the activated first products, ``[pairs, intermediate_size]``, sorted by expert."""
    experts, both, depth = w13.shape
    width = both // 2
    pairs = order.shape[0]

    rows = as_rows(x, depth)
    hidden = x.new_empty(pairs, width)

    tile = _tile(pairs, experts, width)
    programs = blocks_at_most(pairs, experts, tile.rows) * triton.cdiv(width, tile.columns)

    launch(
        gate_up_kernel,
        programs,
        tile,
        rows,
        w13,
        # A kernel needs a pointer, and without a bias reads nothing there.
        x if bias is None else bias.contiguous(),
        order,
        bounds,
        hidden,
        experts,
        pairs // x.shape[0],
        depth,
        width,
        rows.stride(0),
        *w13.stride(),
        function=activation,
        has_bias=bias is not None,
        tile_depth=DEPTH_BYTES // x.element_size(),
    )
    return hidden


def _down(hidden: Tensor, w2: Tensor, bias: Tensor | None, order: Tensor, bounds: Tensor) -> Tensor:
    """Return the outputs of experts in the order of pairs, ``[pairs, hidden_size]``."""
    experts, width, depth = w2.shape
    pairs = order.shape[0]
    outputs = hidden.new_empty(pairs, width)

    tile = _tile(pairs, experts, width)
    programs = blocks_at_most(pairs, experts, tile.rows) * triton.cdiv(width, tile.columns)

    launch(
        down_kernel,
        programs,
        tile,
        hidden,
        w2,
        hidden if bias is None else bias.contiguous(),
        order,
        bounds,
        outputs,
        experts,
        depth,
        width,
        *w2.stride(),
        has_bias=bias is not None,
        tile_depth=DEPTH_BYTES // hidden.element_size(),
    )
    return outputs
