"""Two ops in Pallas. On the CPU, Pallas's interpreter runs them: slowly, to check the results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from opgraft_jax.programs import Arrays, wide

BLOCK = 2**18
"""The most elements of a block. All values of a block fit into a TPU's vector memory."""

SUBLANES = 16
"""The rows of a block are a multiple of this number, as half types need on a TPU."""


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def rms_norm(
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array | None,
    *,
    eps: float,
    interpret: bool,
) -> Arrays:
    """Return the RMS norm. With a residual, return the norm of the sum, and the sum."""
    width = x.shape[-1]
    summands = [x.reshape(-1, width)]
    if residual is not None:
        summands.append(residual.reshape(-1, width))
    scale = None if weight is None else weight.reshape(1, width)

    # One result of a norm alone, two of a sum and its norm.
    count = len(summands)
    scaled = scale is not None
    kernel = functools.partial(_rms_norm, summands=count, scaled=scaled, eps=eps)
    results = _by_rows(kernel, summands, scale, width, count, interpret)
    return tuple(result.reshape(x.shape) for result in results)


@functools.partial(jax.jit, static_argnames=("interpret",))
def silu_and_mul(x: jax.Array, *, interpret: bool) -> Arrays:
    """Return SiLU of the first half, times the second half."""
    *leading, both = x.shape
    width = both // 2
    rows = x.reshape(-1, both)
    (result,) = _by_rows(_silu_and_mul, [rows], None, width, 1, interpret)
    return (result.reshape(*leading, width),)


def _by_rows(
    kernel: Callable[..., None],
    inputs: list[jax.Array],
    shared: jax.Array | None,
    width: int,
    count: int,
    interpret: bool,
) -> Any:
    """Run a kernel over blocks of rows, and return its results, ``[rows, width]`` each.

    The last block may reach beyond the last row. Pallas drops the results of such rows.

    Args:
        kernel: a function of references: to the inputs, to ``shared`` and to the results.
        inputs: arrays of ``[rows, columns]``.
        shared: an array of ``[1, columns]`` for every block, or None.
        width: the columns of each result.
        count: the number of results.
        interpret: run the kernel by Pallas's interpreter.
    """
    rows, columns = inputs[0].shape
    result = jax.ShapeDtypeStruct((rows, width), inputs[0].dtype)
    # A grid has at least one block, and there may be no row.
    if not inputs[0].size:
        return [jnp.zeros(result.shape, result.dtype)] * count

    step = _rows_of_block(rows, columns)
    arguments = list(inputs)
    in_specs = [_row_block(step, columns)] * len(inputs)
    if shared is not None:
        arguments.append(shared)
        in_specs.append(pl.BlockSpec(shared.shape, lambda block: (0, 0)))

    call = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, step),),
        in_specs=in_specs,
        out_specs=[_row_block(step, width)] * count,
        out_shape=[result] * count,
        interpret=interpret,
    )
    return call(*arguments)


def _row_block(step: int, columns: int) -> pl.BlockSpec:
    """Return blocks of ``step`` whole rows, one after another."""
    return pl.BlockSpec((step, columns), lambda block: (block, 0))


def _rows_of_block(rows: int, columns: int) -> int:
    """Return a multiple of SUBLANES: as many rows as a block may have, and no more than needed."""
    most = max(BLOCK // columns // SUBLANES, 1)
    needed: int = pl.cdiv(rows, SUBLANES)
    return min(most, needed) * SUBLANES


def _rms_norm(*refs: Any, summands: int, scaled: bool, eps: float) -> None:
    """Compute the norm of one block.

    Args:
        refs: one or two summands, the weight if ``scaled``, the norm, and the sum of two summands.
        summands: 1 or 2.
        scaled: whether there is a weight.
        eps: added to the mean square.
    """
    x, *others = refs
    total = wide(x[...])
    if summands == 2:
        residual = others.pop(0)
        total = total + wide(residual[...])

    mean_square = jnp.mean(jnp.square(total), -1, keepdims=True)
    normed = total * jax.lax.rsqrt(mean_square + eps)
    if scaled:
        weight = others.pop(0)
        normed = normed * wide(weight[...])

    out = others.pop(0)
    out[...] = normed.astype(out.dtype)
    if summands == 2:
        out_sum = others.pop(0)
        out_sum[...] = total.astype(out_sum.dtype)


def _silu_and_mul(x: Any, out: Any) -> None:
    """Compute one block of ``silu_and_mul``."""
    width = out.shape[-1]
    gate = wide(x[:, :width])
    up = wide(x[:, width:])
    gated = gate * jax.nn.sigmoid(gate) * up
    out[...] = gated.astype(out.dtype)
