"""The ops in ``jax.numpy``, compiled by XLA for each shape and dtype that comes. Half types are computed in float32.

Each returns a tuple, and takes what the op of that name takes; statistics are those of the last dimension.
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
    """Compute Gemma's norm, of the sum with a residual where there is one; the sum is the second result then."""
    total = wide(x) if residual is None else wide(x) + wide(residual)
    normed = total * jax.lax.rsqrt(jnp.mean(jnp.square(total), -1, keepdims=True) + eps)
    out = (normed * (1.0 + wide(weight))).astype(x.dtype)
    return (out,) if residual is None else (out, total.astype(x.dtype))


@functools.partial(jax.jit, static_argnames=("dims", "eps"))
def layer_norm(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, *, dims: int, eps: float
) -> Arrays:
    """Compute the layer norm over the last ``dims`` dimensions."""
    axes = tuple(range(-dims, 0))
    centred = wide(x) - jnp.mean(wide(x), axes, keepdims=True)
    out = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axes, keepdims=True) + eps)
    if weight is not None:
        out = out * wide(weight)
    if bias is not None:
        out = out + wide(bias)
    return (out.astype(x.dtype),)


@functools.partial(jax.jit, static_argnames=("approximate",))
def gelu(x: jax.Array, *, approximate: bool) -> Arrays:
    """Compute GELU, exact or by tanh."""
    return (jax.nn.gelu(wide(x), approximate=approximate).astype(x.dtype),)


@functools.partial(jax.jit, static_argnames=("approximate",))
def gelu_and_mul(x: jax.Array, *, approximate: bool) -> Arrays:
    """Compute GELU of the first half, times the second half."""
    gate, up = jnp.split(wide(x), 2, -1)
    return ((jax.nn.gelu(gate, approximate=approximate) * up).astype(x.dtype),)


def wide(x: jax.Array) -> jax.Array:
    """Widen to float32."""
    return x.astype(jnp.float32)
