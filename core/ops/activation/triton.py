"""Triton kernels for activations, plain and gated. ``functional`` has the maths and arguments.

The kernels compute both tanh forms of GELU as ``t · sigmoid(2u)``, which equals ``0.5 · t · (1 +
tanh(u))`` without cancellation. They clip by comparisons: ``where(t > a, a, t)`` keeps a NaN, and
``minimum`` would not.
"""

# Annotations cannot tell the types of Triton's language, so mypy leaves jitted functions alone.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from opgraft.ops.activation import functional as definitions
from opgraft.ops.checks import expect_choice, expect_floating, expect_not_negative, halves
from opgraft.ops.triton_launch import WIDEST, Tile, as_rows, launch, replaces, tile_of, writable
from torch import Tensor

__all__ = [
    "silu",
    "silu_",
    "gelu",
    "gelu_tanh",
    "gelu_new",
    "gelu_fast",
    "quick_gelu",
    "relu2",
    "xielu",
    "silu_and_mul",
    "mul_and_silu",
    "gelu_and_mul",
    "gelu_and_mul_sparse",
    "fatrelu_and_mul",
    "swigluoai_and_mul",
    "silu_and_mul_with_clamp",
    "swiglustep_and_mul",
]

_SLOPE = tl.constexpr(1.5957691216057308)  # 2 · sqrt(2/π)
_CUBIC = tl.constexpr(0.044715)
_HALF_ROOT = tl.constexpr(0.7071067811865476)  # sqrt(1/2)


@triton.jit
def load_float32(pointer, exists):
    """Load a tile as float32, with zeros outside of the mask ``exists``."""
    return tl.load(pointer, exists, 0.0).to(tl.float32)


@triton.jit
def activated(t, function: tl.constexpr, threshold):
    """Compute an activation of a float32 tile. Only ``fatrelu`` reads ``threshold``."""
    # The branch is chosen when the kernel is compiled, so a kernel has one of them.
    if function == "silu":
        result = t * tl.sigmoid(t)
    elif function == "gelu":
        result = 0.5 * t * (1.0 + tl.erf(t * _HALF_ROOT))
    elif function == "gelu_tanh":
        inner = (t + t * t * t * _CUBIC) * _SLOPE
        result = t * tl.sigmoid(inner)
    elif function == "quick_gelu":
        result = t * tl.sigmoid(1.702 * t)
    elif function == "relu2":
        positive = tl.where(t < 0.0, 0.0, t)
        result = positive * positive
    else:
        tl.static_assert(function == "fatrelu")
        result = tl.where(t <= threshold, 0.0, t)
    return result


@triton.jit
def clipped(t, limit):
    """Clip to the range from ``-limit`` to ``limit``."""
    above = tl.where(t < -limit, -limit, t)
    return tl.where(t > limit, limit, above)


@triton.jit
def gated(gate, up, function: tl.constexpr, first, limit, dtype: tl.constexpr):
    """Multiply an activated gate by ``up``.

    ``first`` is ``alpha`` of ``swigluoai``, and the threshold of ``fatrelu``.
    """
    if function == "swigluoai":
        low = tl.where(gate > limit, limit, gate)
        result = (clipped(up, limit) + 1.0) * low * tl.sigmoid(first * low)
    elif function == "silu_with_clamp":
        low = tl.where(gate > limit, limit, gate)
        result = activated(low, "silu", first) * clipped(up, limit)
    elif function == "swiglustep":
        act = activated(gate, "silu", first)
        low = tl.where(act > limit, limit, act)
        result = low * clipped(up, limit)
    else:
        # Two ops, an activation and a product, round the activation to the dtype between them.
        act = activated(gate, function, first).to(dtype).to(tl.float32)
        result = act * up
    return result


@triton.jit
def expm1(t):
    """Compute ``exp(t) - 1`` for ``t <= 0``."""
    # Near zero the difference would cancel, and the terms of the series do not.
    series = 1.0 + t / 6.0 * (1.0 + t / 7.0 * (1.0 + t / 8.0))
    series = 1.0 + t / 2.0 * (1.0 + t / 3.0 * (1.0 + t / 4.0 * (1.0 + t / 5.0 * series)))
    return tl.where(t > -0.5, t * series, tl.exp(t) - 1.0)


@triton.jit
def rows_of(index, tile_rows: tl.constexpr):
    """Return the rows of block ``index`` of rows, ``[rows, 1]``, with the 64 bits of offsets."""
    return index.to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]


@triton.jit
def tile_at(index, rows, width, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """Return the rows, with the 64 bits of offsets, the columns and the mask of tile ``index``."""
    # Any width of 32 bits works: only columns outside of the mask exceed the width, so no sum
    # overflows inside of the mask.
    blocks = (width - 1) // tile_columns + 1
    start = (index % blocks) * tile_columns

    row = rows_of(index // blocks, tile_rows)
    column = tl.arange(0, tile_columns)[None, :]
    inside = (row < rows) & (column < width - start)
    return row, start + column, inside


@triton.jit
def plain_kernel(
    x,
    out,
    rows,
    width,
    stride,
    out_stride,
    function: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row, column, inside = tile_at(tl.program_id(0), rows, width, tile_rows, tile_columns)
    t = load_float32(x + row * stride + column, inside)
    result = activated(t, function, 0.0)
    tl.store(out + row * out_stride + column, result, inside)


@triton.jit
def xielu_kernel(
    x,
    out,
    alpha_p,
    alpha_n,
    beta,
    eps,
    rows,
    width,
    stride,
    out_stride,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row, column, inside = tile_at(tl.program_id(0), rows, width, tile_rows, tile_columns)
    t = load_float32(x + row * stride + column, inside)
    positive = softplus(tl.load(alpha_p).to(tl.float32))
    negative = beta + softplus(tl.load(alpha_n).to(tl.float32))

    clipped_t = tl.where(t > eps, eps, t)
    below = (expm1(clipped_t) - t) * negative
    above = positive * t * t
    result = tl.where(t > 0.0, above, below) + beta * t
    tl.store(out + row * out_stride + column, result, inside)


@triton.jit
def softplus(t):
    """Compute ``log(1 + exp(t))``."""
    small = tl.exp(-tl.abs(t))
    total = 1.0 + small
    # The sum rounds a small exponential away. The factor ``small / (total - 1)`` corrects the
    # logarithm for that rounding (Goldberg, 1991).
    is_one = total == 1.0
    rounded = tl.where(is_one, 1.0, total - 1.0)
    logarithm = tl.where(is_one, small, tl.log(total) * small / rounded)

    positive = tl.where(t > 0.0, t, 0.0)
    return positive + logarithm


@triton.jit
def gated_kernel(
    x,
    out,
    rows,
    width,
    stride,
    gate_at,
    up_at,
    first,
    limit,
    function: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Compute gated activations. Gates begin at ``gate_at`` of each row, and ups at ``up_at``."""
    row, column, inside = tile_at(tl.program_id(0), rows, width, tile_rows, tile_columns)
    x_row = x + row * stride
    gate = load_float32(x_row + gate_at + column, inside)
    up = load_float32(x_row + up_at + column, inside)

    result = gated(gate, up, function, first, limit, x.dtype.element_ty)
    tl.store(out + row * width + column, result, inside)


@triton.jit
def interleaved_kernel(
    x,
    out,
    rows,
    width,
    stride,
    first,
    limit,
    function: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Compute as ``gated_kernel``, with gates at even elements and ups at odd elements."""
    # Neighbours are loaded together and split in registers, so that memory is read in order.
    row, both, inside = tile_at(tl.program_id(0), rows, 2 * width, tile_rows, 2 * tile_columns)
    loaded = load_float32(x + row * stride + both, inside)
    pairs = tl.reshape(loaded, (tile_rows, tile_columns, 2))
    gate, up = tl.split(pairs)

    row, column, inside = tile_at(tl.program_id(0), rows, width, tile_rows, tile_columns)
    result = gated(gate, up, function, first, limit, x.dtype.element_ty)
    tl.store(out + row * width + column, result, inside)


@triton.jit
def sparse_kernel(
    x,
    out,
    rows,
    width,
    stride,
    quantile,
    function: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Compute whole rows: the statistics of a row block by block, then the gates above the cut."""
    row = rows_of(tl.program_id(0), tile_rows)
    exists = row < rows
    gate_row = x + row * stride
    up_row = gate_row + width
    out_row = out + row * width

    cut = cut_of_rows(gate_row, exists, width, quantile, tile_rows, tile_columns)

    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = exists & (column < width)
        gate = load_float32(gate_row + column, inside) - cut
        up = load_float32(up_row + column, inside)
        kept = tl.where(gate < 0.0, 0.0, gate)
        result = activated(kept, function, 0.0) * up
        tl.store(out_row + column, result, inside)


@triton.jit
def cut_of_rows(
    gate_row, exists, width, quantile, tile_rows: tl.constexpr, tile_columns: tl.constexpr
):
    """Compute the mean plus ``quantile`` standard deviations of each row, ``[rows, 1]``."""
    mean = tl.zeros((tile_rows, 1), tl.float32)
    squares = tl.zeros((tile_rows, 1), tl.float32)
    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = exists & (column < width)
        gate = load_float32(gate_row + column, inside)
        # The last block may be smaller.
        count = tl.minimum(tile_columns, width - start)
        mean, squares = merged(mean, squares, start, gate, inside, count)
    return mean + quantile * tl.sqrt(squares / width)


@triton.jit
def merged(mean, squares, count, block, inside, block_count):
    """Add a block to the mean and the sum of squared deviations of ``count`` elements per row.

    The formula by Chan et al. does not subtract large sums.
    """
    total = tl.sum(tl.where(inside, block, 0.0), 1, keep_dims=True)
    block_mean = total / block_count
    deviation = tl.where(inside, block - block_mean, 0.0)
    block_squares = tl.sum(deviation * deviation, 1, keep_dims=True)

    # The sum with a float makes the division one of floats.
    share = block_count / (count + block_count + 0.0)
    change = block_mean - mean
    new_mean = mean + change * share
    new_squares = squares + block_squares + change * change * count * share
    return new_mean, new_squares


def _elementwise(kernel: Any, x: Tensor, out: Tensor, *others: Any, **constants: Any) -> None:
    """Launch a kernel on all elements.

    The kernel takes ``x``, ``out``, ``others``, the number of rows, the width, and both row
    strides.
    """
    if x.is_contiguous() and out.is_contiguous():
        # One row of all elements has no partly filled tile but the last.
        x = x.view(1, -1)
        out = out.view(1, -1)
        tile = Tile(1, 2048, 4)
    else:
        width = x.shape[-1]
        tile = tile_of(width, 2048, 2048)
        x = as_rows(x, width)
        out = as_rows(out, width)

    rows, width = x.shape
    programs = triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.columns)
    sizes = (rows, width, x.stride(0), out.stride(0))
    launch(kernel, programs, tile, x, out, *others, *sizes, **constants)


def _launch_plain(op: str, x: Tensor, function: str) -> Tensor:
    expect_floating(op, "x", x)
    out = x.new_empty(x.shape)
    if x.numel():
        _elementwise(plain_kernel, x, out, function=function)
    return out


@replaces(definitions.silu)
def silu(x: Tensor) -> Tensor:
    return _launch_plain("silu", x, "silu")


@replaces(definitions.silu_)
def silu_(x: Tensor) -> None:
    expect_floating("silu_", "x", x)
    if not x.numel():
        return

    # A kernel would write several times to elements that share memory.
    if writable(x):
        _elementwise(plain_kernel, x, x, function="silu")
    else:
        x.copy_(_launch_plain("silu_", x, "silu"))


@replaces(definitions.gelu)
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    function = _gelu("gelu", approximate)
    return _launch_plain("gelu", x, function)


@replaces(definitions.gelu_tanh)
def gelu_tanh(x: Tensor) -> Tensor:
    return _launch_plain("gelu_tanh", x, "gelu_tanh")


@replaces(definitions.gelu_new)
def gelu_new(x: Tensor) -> Tensor:
    return _launch_plain("gelu_new", x, "gelu_tanh")


@replaces(definitions.gelu_fast)
def gelu_fast(x: Tensor) -> Tensor:
    return _launch_plain("gelu_fast", x, "gelu_tanh")


@replaces(definitions.quick_gelu)
def quick_gelu(x: Tensor) -> Tensor:
    return _launch_plain("quick_gelu", x, "quick_gelu")


@replaces(definitions.relu2)
def relu2(x: Tensor) -> Tensor:
    return _launch_plain("relu2", x, "relu2")


@replaces(definitions.xielu)
def xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    definitions.expect_parameters_of_xielu(x, alpha_p, alpha_n)
    out = x.new_empty(x.shape)
    if x.numel():
        _elementwise(xielu_kernel, x, out, alpha_p, alpha_n, beta, eps)
    return out


def _launch_gated(
    x: Tensor,
    op: str,
    function: str,
    first: float = 0.0,
    limit: float = 0.0,
    activated_half: int = 0,
) -> Tensor:
    """Return the gated activation of ``x``. The gate is the half number ``activated_half``."""
    halves(op, "x", x)
    out = definitions.half_of(x)
    width = out.shape[-1]
    if out.numel():
        gate_at = activated_half * width
        up_at = width - gate_at
        _row_tiles(gated_kernel, x, out, gate_at, up_at, first, limit, function=function)
    return out


def _row_tiles(kernel: Any, x: Tensor, out: Tensor, *others: Any, **constants: Any) -> None:
    """Launch a kernel on tiles of rows.

    The kernel takes ``x``, ``out``, the number of rows, the width, the row stride of ``x``, and
    ``others``.
    """
    width = out.shape[-1]
    rows = as_rows(x, x.shape[-1])
    count = rows.shape[0]
    tile_rows, tile_columns, _ = tile_of(width, 1024, 1024)

    # Twice the warps of one operand: a tile loads two.
    tile = Tile(tile_rows, tile_columns, warps=4)
    programs = triton.cdiv(count, tile.rows) * triton.cdiv(width, tile.columns)
    sizes = (count, width, rows.stride(0))
    launch(kernel, programs, tile, rows, out, *sizes, *others, **constants)


def _gelu(op: str, approximate: str) -> str:
    expect_choice(op, "approximate", approximate, definitions.APPROXIMATIONS)
    return "gelu_tanh" if approximate == "tanh" else "gelu"


@replaces(definitions.silu_and_mul)
def silu_and_mul(x: Tensor) -> Tensor:
    return _launch_gated(x, "silu_and_mul", "silu")


@replaces(definitions.mul_and_silu)
def mul_and_silu(x: Tensor) -> Tensor:
    return _launch_gated(x, "mul_and_silu", "silu", activated_half=1)


@replaces(definitions.gelu_and_mul)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    function = _gelu("gelu_and_mul", approximate)
    return _launch_gated(x, "gelu_and_mul", function)


@replaces(definitions.fatrelu_and_mul)
def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    return _launch_gated(x, "fatrelu_and_mul", "fatrelu", threshold)


@replaces(definitions.silu_and_mul_with_clamp)
def silu_and_mul_with_clamp(x: Tensor, limit: float) -> Tensor:
    expect_not_negative("silu_and_mul_with_clamp", "limit", limit)
    return _launch_gated(x, "silu_and_mul_with_clamp", "silu_with_clamp", limit=limit)


@replaces(definitions.swiglustep_and_mul)
def swiglustep_and_mul(x: Tensor, limit: float = 7.0) -> Tensor:
    expect_not_negative("swiglustep_and_mul", "limit", limit)
    return _launch_gated(x, "swiglustep_and_mul", "swiglustep", limit=limit)


@replaces(definitions.swigluoai_and_mul)
def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    expect_not_negative("swigluoai_and_mul", "limit", limit)
    halves("swigluoai_and_mul", "x", x)
    out = definitions.half_of(x)
    if out.numel():
        _row_tiles(interleaved_kernel, x, out, alpha, limit, function="swigluoai")
    return out


@replaces(definitions.gelu_and_mul_sparse)
def gelu_and_mul_sparse(x: Tensor, activation_sparsity: float, approximate: str = "none") -> Tensor:
    definitions.expect_sparsity(activation_sparsity)
    function = _gelu("gelu_and_mul_sparse", approximate)
    halves("gelu_and_mul_sparse", "x", x)

    out = definitions.half_of(x)
    width = out.shape[-1]
    if not out.numel():
        return out

    rows = as_rows(x, x.shape[-1])
    count = rows.shape[0]
    tile = tile_of(width, 2048, WIDEST)
    programs = triton.cdiv(count, tile.rows)

    quantile = definitions.normal_quantile(activation_sparsity).item()
    sizes = (count, width, rows.stride(0))
    launch(sparse_kernel, programs, tile, rows, out, *sizes, quantile, function=function)
    return out
