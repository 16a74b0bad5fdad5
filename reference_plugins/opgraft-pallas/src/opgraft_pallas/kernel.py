"""Attention by blocks with an online softmax: Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135.

A program of the grid holds one block of queries and walks the blocks of keys and values, so its memory does not grow
with the sequence. Its numbers were checked in Pallas's interpreter on a CPU, and jax lowers it for a TPU; it has not
been run on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = 128
"""Queries, and keys, of one step: the width of a TPU's matrix unit."""


@functools.cache
def attention(scale: float, is_causal: bool, interpret: bool) -> Callable[..., Any]:
    """Build a function of query ``[H, L, E]``, key ``[K, S, E]`` and value ``[K, S, Ev]``; ``K`` divides ``H``.

    The same function for the same arguments, because torch_xla traces a function anew for each identity.
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        heads, length, _ = query.shape
        keys, features = value.shape[1:]
        group = heads // key.shape[0]
        query, key, value = (_whole_blocks(x) for x in (query, key, value))
        call = pl.pallas_call(
            functools.partial(_step, scale=scale, is_causal=is_causal, keys=keys),
            grid=(heads, query.shape[1] // BLOCK, key.shape[1] // BLOCK),
            in_specs=[
                pl.BlockSpec(
                    (None, BLOCK, query.shape[2]), lambda head, row, column: (head, row, 0)
                ),
                pl.BlockSpec(
                    (None, BLOCK, key.shape[2]),
                    lambda head, row, column: (head // group, column, 0),
                ),
                pl.BlockSpec(
                    (None, BLOCK, features), lambda head, row, column: (head // group, column, 0)
                ),
            ],
            out_specs=pl.BlockSpec(
                (None, BLOCK, features), lambda head, row, column: (head, row, 0)
            ),
            out_shape=jax.ShapeDtypeStruct((heads, query.shape[1], features), query.dtype),
            scratch_shapes=[pltpu.VMEM((BLOCK, width), jnp.float32) for width in (1, 1, features)],
            interpret=interpret,
        )
        attended: jax.Array = call(query, key, value)[:, :length]
        return attended

    return attend


def _whole_blocks(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK), (0, 0)))


def _step(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    highest: Any,
    total: Any,
    weighted: Any,
    **options: Any,
) -> None:
    """Attend to one block of keys. The last three hold over the blocks what softmax needs: maximum, sum, result."""
    row, column = pl.program_id(1), pl.program_id(2)

    def begin() -> None:
        highest[...] = jnp.full_like(highest, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    def update() -> None:
        scores = _scores(query[...], key[...], row * BLOCK, column * BLOCK, **options)
        new_highest = jnp.maximum(highest[...], scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - new_highest)
        fading = jnp.exp(highest[...] - new_highest)
        total[...] = total[...] * fading + weights.sum(axis=1, keepdims=True)
        weighted[...] = weighted[...] * fading + dot(weights, value[...])
        highest[...] = new_highest

    def finish() -> None:
        out[...] = (weighted[...] / total[...]).astype(out.dtype)

    pl.when(column == 0)(begin)
    # Later blocks hold unseen keys only.
    pl.when(column <= row if options["is_causal"] else column >= 0)(update)
    pl.when(column == pl.num_programs(2) - 1)(finish)


def _scores(
    query: jax.Array,
    key: jax.Array,
    first_row: Any,
    first_column: Any,
    *,
    scale: float,
    is_causal: bool,
    keys: int,
) -> jax.Array:
    """Scale products; give minus infinity for keys that are padding or come after the query. Key 0 is always seen."""
    scores = dot(query, key.T) * scale
    columns = first_column + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    seen = columns < keys
    if is_causal:
        seen &= columns <= first_row + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    return jnp.where(seen, scores, -jnp.inf)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply in float32, which a matrix unit reaches in several passes."""
    return jnp.dot(
        a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
