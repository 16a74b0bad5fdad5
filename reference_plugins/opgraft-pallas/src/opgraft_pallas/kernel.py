"""Attention over whole sequences, block by block, with an online softmax.

Sources: Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135.

A program of the grid holds one block of queries and walks the blocks of keys and values. So its
memory does not grow with the sequence.

The results were checked in Pallas's interpreter on a CPU, and jax lowers the kernel for a TPU. It
has not been run on a TPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = 128
"""Queries, and keys, of one step: the width of a TPU's matrix unit."""


@functools.cache
def attention(scale: float, is_causal: bool, interpret: bool) -> Callable[..., Any]:
    """Return a function of query, key and value that returns ``[heads, length, value_size]``.

    The function takes query ``[heads, length, size]``, key ``[key_heads, keys, size]`` and value
    ``[key_heads, keys, value_size]``. ``heads`` is a multiple of ``key_heads``.

    Equal arguments give the same function, because torch_xla traces every new function anew.
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        heads, length, size = query.shape
        key_heads, keys, value_size = value.shape
        group = heads // key_heads
        query, key, value = (_whole_blocks(x) for x in (query, key, value))

        def queries(width: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, BLOCK, width), lambda head, row, column: (head, row, 0))

        def keys_of_group(width: int) -> pl.BlockSpec:
            shape = (None, BLOCK, width)
            return pl.BlockSpec(shape, lambda head, row, column: (head // group, column, 0))

        step = functools.partial(_step, scale=scale, is_causal=is_causal, keys=keys)
        call = pl.pallas_call(
            step,
            grid=(heads, query.shape[1] // BLOCK, key.shape[1] // BLOCK),
            in_specs=[queries(size), keys_of_group(size), keys_of_group(value_size)],
            out_specs=queries(value_size),
            out_shape=jax.ShapeDtypeStruct((heads, query.shape[1], value_size), query.dtype),
            scratch_shapes=softmax_memory(BLOCK, value_size),
            interpret=interpret,
        )
        attended: jax.Array = call(query, key, value)
        return attended[:, :length]

    return attend


class Softmax(NamedTuple):
    """The state of an online softmax over blocks of keys, as references to memory.

    Attributes:
        highest: the greatest score so far, ``[rows, 1]``.
        total: the sum of weights so far, relative to ``highest``, ``[rows, 1]``.
        weighted: the weighted sum of values so far, ``[rows, value_size]``.
    """

    highest: Any
    total: Any
    weighted: Any

    def begin(self, lowest: float) -> None:
        """Start with no keys. ``lowest`` stands below every score."""
        self.highest[...] = jnp.full_like(self.highest, lowest)
        self.total[...] = jnp.zeros_like(self.total)
        self.weighted[...] = jnp.zeros_like(self.weighted)

    def add(self, highest: jax.Array, weights: jax.Array, values: jax.Array) -> None:
        """Add a block of keys.

        Args:
            highest: the greatest score, this block included, ``[rows, 1]``.
            weights: of the block's keys, relative to ``highest``, ``[rows, keys]``.
            values: ``[keys, value_size]``.
        """
        # Earlier weights are relative to an earlier, lower score.
        fading = jnp.exp(self.highest[...] - highest)
        self.total[...] = self.total[...] * fading + weights.sum(axis=1, keepdims=True)
        self.weighted[...] = self.weighted[...] * fading + dot(weights, values)
        self.highest[...] = highest


def softmax_memory(rows: int, value_size: int) -> list[Any]:
    """Return the shapes of the memory of a Softmax."""
    widths = (1, 1, value_size)
    return [pltpu.VMEM((rows, width), jnp.float32) for width in widths]


def _whole_blocks(x: jax.Array) -> jax.Array:
    """Pad the second of three dimensions to whole blocks."""
    missing = -x.shape[1] % BLOCK
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0)))


def _step(
    query: Any, key: Any, value: Any, out: Any, *memory: Any, is_causal: bool, **options: Any
) -> None:
    """Attend to one block of keys. ``memory`` holds the softmax from block to block."""
    row = pl.program_id(1)
    column = pl.program_id(2)
    softmax = Softmax(*memory)

    def begin() -> None:
        softmax.begin(-jnp.inf)

    def update() -> None:
        first_row = row * BLOCK
        first_column = column * BLOCK
        scores = _scores(
            query[...], key[...], first_row, first_column, is_causal=is_causal, **options
        )
        highest = jnp.maximum(softmax.highest[...], scores.max(axis=1, keepdims=True))
        softmax.add(highest, jnp.exp(scores - highest), value[...])

    def finish() -> None:
        attended = softmax.weighted[...] / softmax.total[...]
        out[...] = attended.astype(out.dtype)

    pl.when(column == 0)(begin)
    # With a causal mask, the blocks after the queries' own block hold unseen keys only.
    is_seen = column <= row if is_causal else column >= 0
    pl.when(is_seen)(update)
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
    """Return scores ``[rows, columns]``, with minus infinity for unseen keys.

    Padding is unseen, and with a causal mask every key after the query. Key 0 is always seen, so
    that no row has minus infinity only.
    """
    scores = dot(query, key.T) * scale
    columns = first_column + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    seen = columns < keys
    if is_causal:
        rows = first_row + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        seen &= columns <= rows
    return jnp.where(seen, scores, -jnp.inf)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the matrix product in float32. A matrix unit needs several passes for this."""
    a = a.astype(jnp.float32)
    b = b.astype(jnp.float32)
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)
