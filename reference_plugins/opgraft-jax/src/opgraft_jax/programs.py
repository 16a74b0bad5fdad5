"""Ops in ``jax.numpy``. XLA compiles a program for each shape and dtype.

Each function takes the arguments of the op of its name, and returns a tuple of arrays. Half types
are computed in float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

Arrays = tuple[jax.Array, ...]


@functools.partial(jax.jit, static_argnames=("eps",))
def gemma_rms_norm(
    x: jax.Array, residual: jax.Array | None, weight: jax.Array, *, eps: float
) -> Arrays:
    """Return Gemma's norm. With a residual, return the norm of the sum, and the sum."""
    total = wide(x)
    if residual is not None:
        total = total + wide(residual)

    mean_square = jnp.mean(jnp.square(total), -1, keepdims=True)
    normed = total * jax.lax.rsqrt(mean_square + eps)
    # Gemma's checkpoints store the distance of a weight from one.
    scale = 1.0 + wide(weight)
    out = (normed * scale).astype(x.dtype)

    if residual is None:
        return (out,)
    return out, total.astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("dims", "eps"))
def layer_norm(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, *, dims: int, eps: float
) -> Arrays:
    """Return the layer norm over the last ``dims`` dimensions."""
    axes = tuple(range(-dims, 0))
    x_wide = wide(x)
    # Two passes: the mean of squares less the square of the mean would cancel digits.
    mean = jnp.mean(x_wide, axes, keepdims=True)
    centred = x_wide - mean
    variance = jnp.mean(jnp.square(centred), axes, keepdims=True)
    out = centred * jax.lax.rsqrt(variance + eps)

    if weight is not None:
        out = out * wide(weight)
    if bias is not None:
        out = out + wide(bias)
    return (out.astype(x.dtype),)


@functools.partial(jax.jit, static_argnames=("approximate",))
def gelu(x: jax.Array, *, approximate: bool) -> Arrays:
    """Return GELU: exact, or approximated by tanh."""
    out = jax.nn.gelu(wide(x), approximate=approximate)
    return (out.astype(x.dtype),)


@functools.partial(jax.jit, static_argnames=("approximate",))
def gelu_and_mul(x: jax.Array, *, approximate: bool) -> Arrays:
    """Return GELU of the first half, times the second half."""
    gate, up = jnp.split(wide(x), 2, -1)
    activated = jax.nn.gelu(gate, approximate=approximate)
    out = activated * up
    return (out.astype(x.dtype),)


def wide(x: jax.Array) -> jax.Array:
    """Return an array in float32."""
    return x.astype(jnp.float32)
