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

    return functools.partial(_attend, scale=scale, is_causal=is_causal, interpret=interpret)


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float,
    is_causal: bool,
    interpret: bool,
) -> jax.Array:
    """Return attention, as :func:`attention` describes."""
    heads, length, size = query.shape
    key_heads, keys, value_size = value.shape
    group = heads // key_heads

    rows = pl.cdiv(length, BLOCK)
    columns = pl.cdiv(keys, BLOCK)
    padded = (heads, rows * BLOCK, value_size)
    call = pl.pallas_call(
        functools.partial(_step, scale=scale, is_causal=is_causal, keys=keys),
        grid=(heads, rows, columns),
        in_specs=[_queries(size), _keys(size, group), _keys(value_size, group)],
        out_specs=_queries(value_size),
        out_shape=jax.ShapeDtypeStruct(padded, query.dtype),
        scratch_shapes=softmax_memory(BLOCK, value_size),
        interpret=interpret,
    )

    blocks = [_whole_blocks(x) for x in (query, key, value)]
    attended: jax.Array = call(*blocks)
    return attended[:, :length]


def _queries(width: int) -> pl.BlockSpec:
    """Return the blocks of queries, or of their results."""

    def place(head: Any, row: Any, column: Any) -> tuple[Any, Any, int]:
        return head, row, 0

    return pl.BlockSpec((None, BLOCK, width), place)


def _keys(width: int, group: int) -> pl.BlockSpec:
    """Return the blocks of keys or values. ``group`` heads of queries share a head of keys."""

    def place(head: Any, row: Any, column: Any) -> tuple[Any, Any, int]:
        return head // group, column, 0

    return pl.BlockSpec((None, BLOCK, width), place)


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
        # Nobody clears the memory: the softmax of other queries may be in it.
        self.total[...] = jnp.zeros_like(self.total)
        self.weighted[...] = jnp.zeros_like(self.weighted)

    def highest_with(self, scores: jax.Array) -> jax.Array:
        """Return the greatest score of each row, ``scores`` included, ``[rows, 1]``."""
        highest = scores.max(axis=1, keepdims=True)
        return jnp.maximum(self.highest[...], highest)

    def add(self, highest: jax.Array, weights: jax.Array, values: jax.Array) -> None:
        """Add a block of keys.

        Args:
            highest: the greatest score, this block included, ``[rows, 1]``.
            weights: of the block's keys, relative to ``highest``, ``[rows, keys]``.
            values: ``[keys, value_size]``.
        """
        # Earlier weights are relative to an earlier, lower score.
        fading = jnp.exp(self.highest[...] - highest)
        total = weights.sum(axis=1, keepdims=True)
        weighted = dot(weights, values)
        self.total[...] = self.total[...] * fading + total
        self.weighted[...] = self.weighted[...] * fading + weighted
        self.highest[...] = highest


def softmax_memory(rows: int, value_size: int) -> list[Any]:
    """Return the shapes of the memory of a Softmax."""
    widths = (1, 1, value_size)
    return [pltpu.VMEM((rows, width), jnp.float32) for width in widths]


def _whole_blocks(x: jax.Array) -> jax.Array:
    """Pad the second of three dimensions to whole blocks."""
    length = x.shape[1]
    missing = -length % BLOCK
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
        scores = _scores(
            query[...], key[...], row * BLOCK, column * BLOCK, is_causal=is_causal, **options
        )
        highest = softmax.highest_with(scores)
        weights = jnp.exp(scores - highest)
        softmax.add(highest, weights, value[...])

    def finish() -> None:
        attended = softmax.weighted[...] / softmax.total[...]
        out[...] = attended.astype(out.dtype)

    pl.when(column == 0)(begin)
    # With a causal mask, the blocks after the queries' own block hold unseen keys only.
    is_seen = column <= row if is_causal else column >= 0
    last_column = pl.num_programs(2) - 1
    pl.when(is_seen)(update)
    pl.when(column == last_column)(finish)


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
    """Return the matrix product in float32."""
    a = a.astype(jnp.float32)
    b = b.astype(jnp.float32)
    # By default a TPU rounds the factors to bfloat16. The full precision takes several passes.
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)
