"""The two ops in Pallas. On the CPU its interpreter runs them, which is there to check them and not to be fast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from opgraft_jax.programs import Arrays, wide

BLOCK = 2**18
"""The elements of a block, at most: with what is computed of them they fill a fraction of a TPU's vector memory."""
SUBLANES = 16
"""The rows of a block are a multiple of it, which every dtype here allows on a TPU."""


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def rms_norm(
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array | None,
    *,
    eps: float,
    interpret: bool,
) -> Arrays:
    """Compute the norm, of the sum with a residual where there is one; the sum is the second result then."""
    width = x.shape[-1]
    rows = [each.reshape(-1, width) for each in (x, residual) if each is not None]
    scale = None if weight is None else weight.reshape(1, width)
    kernel = functools.partial(_rms_norm, streams=len(rows), scaled=scale is not None, eps=eps)
    results = _by_rows(kernel, rows, scale, width, len(rows), interpret)
    return tuple(result.reshape(x.shape) for result in results)


@functools.partial(jax.jit, static_argnames=("interpret",))
def silu_and_mul(x: jax.Array, *, interpret: bool) -> Arrays:
    """Compute SiLU of the first half, times the second half."""
    width = x.shape[-1] // 2
    (result,) = _by_rows(_silu_and_mul, [x.reshape(-1, 2 * width)], None, width, 1, interpret)
    return (result.reshape(*x.shape[:-1], width),)


def _by_rows(
    kernel: Callable[..., None],
    inputs: list[jax.Array],
    shared: jax.Array | None,
    width: int,
    count: int,
    interpret: bool,
) -> Any:
    """Run a kernel over blocks of rows. What it makes of rows beyond the last is never stored.

    Args:
        kernel: gets references to the inputs, to what is shared and to the results.
        inputs: ``[rows, columns]`` each.
        shared: ``[1, columns]``, which every block gets.
        width: the columns of each result.
        count: the number of results.
        interpret: run the kernel by Pallas's interpreter.
    """
    rows, columns = inputs[0].shape
    if not inputs[0].size:  # a grid has at least one block
        return [jnp.zeros((rows, width), inputs[0].dtype)] * count
    step = min(max(BLOCK // columns // SUBLANES, 1), -(-rows // SUBLANES)) * SUBLANES
    own = [pl.BlockSpec((step, columns), lambda block: (block, 0)) for _ in inputs]
    common = [] if shared is None else [pl.BlockSpec(shared.shape, lambda block: (0, 0))]
    call = pl.pallas_call(
        kernel,
        grid=(-(-rows // step),),
        in_specs=own + common,
        out_specs=[pl.BlockSpec((step, width), lambda block: (block, 0))] * count,
        out_shape=[jax.ShapeDtypeStruct((rows, width), inputs[0].dtype)] * count,
        interpret=interpret,
    )
    return call(*inputs, *([] if shared is None else [shared]))


def _rms_norm(*refs: Any, streams: int, scaled: bool, eps: float) -> None:
    inputs, outs = refs[:streams], refs[streams + scaled :]
    total = sum((wide(ref[...]) for ref in inputs[1:]), wide(inputs[0][...]))
    out = total * jax.lax.rsqrt(jnp.mean(jnp.square(total), -1, keepdims=True) + eps)
    if scaled:
        out = out * wide(refs[streams][...])
    outs[0][...] = out.astype(outs[0].dtype)
    if streams == 2:
        outs[1][...] = total.astype(outs[1].dtype)


def _silu_and_mul(x: Any, out: Any) -> None:
    width = out.shape[-1]
    gate = wide(x[:, :width])
    out[...] = (gate * jax.nn.sigmoid(gate) * wide(x[:, width:])).astype(out.dtype)
