"""Attention over keys and values in pages, with an online softmax.

Sources: Kwon et al., arXiv:2309.06180, and arXiv:1805.02867.

A program of the grid holds rows of one sequence that share a key head, and walks the pages of the
sequence. The page table is known before a page is fetched, so pages that no row sees are not
fetched.

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

from opgraft_pallas.kernel import BLOCK, Softmax, dot, softmax_memory

LOWEST = -1e30
"""Stands below every score. It is finite, because a row may see no key of a page."""

SUBLANES = 16
"""The rows of a block are a multiple of this number, as half types need on a TPU."""


class Settings(NamedTuple):
    """The settings of a layer, as in ``opgraft.ops.Attention``."""

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None


class Sequence(NamedTuple):
    """One sequence, and the place of a block in it.

    Attributes:
        first: the position of the first new token.
        length: the number of tokens in the cache, the new ones included.
        first_row: the first of the block's rows.
        first_key: the position of the page's first key.
    """

    first: Any
    length: Any
    first_row: Any
    first_key: Any


@functools.cache
def paged_attention(settings: Settings, interpret: bool) -> Callable[..., Any]:
    """Return a function of the arguments of ``PaddedAttention.attend_rows``.

    The function takes query ``[sequences, tokens, heads, size]``, cache
    ``[blocks, 2, kv_heads, block_size, size]`` and table ``[sequences, pages]``. It returns a
    tensor in the shape of the query. ``heads`` is a multiple of ``kv_heads``.

    Equal arguments give the same function, because torch_xla traces every new function anew.
    """

    return functools.partial(_attend, settings=settings, interpret=interpret)


def _attend(
    query: jax.Array,
    cache: jax.Array,
    table: jax.Array,
    first: jax.Array,
    lens: jax.Array,
    *,
    settings: Settings,
    interpret: bool,
) -> jax.Array:
    """Return attention, as :func:`paged_attention` describes."""
    sequences, tokens, heads, size = query.shape
    kv_heads, block_size = cache.shape[2:4]
    group = heads // kv_heads
    step = _rows_of_step(tokens * group)
    rows = _in_rows(query, kv_heads, step)

    steps = rows.shape[2] // step
    pages = table.shape[1]
    call = pl.pallas_call(
        functools.partial(_step, settings=settings, group=group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            # The first three arguments of the call: _page reads them before it fetches a page.
            num_scalar_prefetch=3,
            grid=(sequences, kv_heads, steps, pages),
            in_specs=[_rows(step, size), _page(0, block_size, size), _page(1, block_size, size)],
            out_specs=_rows(step, size),
            scratch_shapes=softmax_memory(step, size),
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, query.dtype),
        interpret=interpret,
    )

    # Keys and values are in one cache: each of the two has blocks of its own.
    attended = call(table, first, lens, rows, cache, cache)
    return _by_token(attended, query.shape)


def _rows_of_step(rows: int) -> int:
    """Return as many rows as a matrix unit takes, or all rows if they are fewer."""
    needed: int = pl.cdiv(rows, SUBLANES) * SUBLANES
    return min(BLOCK, needed)


def _in_rows(query: jax.Array, kv_heads: int, step: int) -> jax.Array:
    """Return ``[sequences, kv_heads, rows, size]``, the rows padded to a multiple of ``step``.

    A row is one query head of one token. The rows of a token follow one another.
    """
    sequences, tokens, heads, size = query.shape
    group = heads // kv_heads
    by_token = query.reshape(sequences, tokens, kv_heads, group, size)
    by_head = by_token.transpose(0, 2, 1, 3, 4)

    count = tokens * group
    rows = by_head.reshape(sequences, kv_heads, count, size)
    padding = -count % step
    return jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0)))


def _by_token(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo ``_in_rows``: return ``[sequences, tokens, heads, size]``, the given shape."""
    sequences, tokens, heads, size = shape
    kv_heads = rows.shape[1]
    group = heads // kv_heads

    count = tokens * group
    # Rows that only pad the last step end here.
    rows = rows[:, :, :count]
    by_head = rows.reshape(sequences, kv_heads, tokens, group, size)
    by_token = by_head.transpose(0, 2, 1, 3, 4)
    return by_token.reshape(shape)


def _rows(step: int, size: int) -> pl.BlockSpec:
    """Return the blocks of rows, or of their results."""

    def place(sequence: Any, head: Any, row: Any, *_: Any) -> Any:
        return sequence, head, row, 0

    return pl.BlockSpec((None, None, step, size), place)


def _page(kind: int, block_size: int, size: int) -> pl.BlockSpec:
    """Return the pages of a sequence: of keys if ``kind`` is 0, of values if it is 1."""

    def place(
        sequence: Any, head: Any, _: Any, column: Any, table: Any, first: Any, lens: Any
    ) -> Any:
        # A step beyond the sequence takes the last page again: an equal page is not fetched.
        last = jnp.maximum(lens[sequence] - 1, 0) // block_size
        page = jnp.minimum(column, last)
        return table[sequence, page], kind, head, 0, 0

    return pl.BlockSpec((None, None, None, block_size, size), place)


def _step(
    table: Any,
    first: Any,
    lens: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    *memory: Any,
    settings: Settings,
    group: int,
) -> None:
    """Attend to one page. ``memory`` holds the softmax from page to page."""
    sequence = pl.program_id(0)
    row = pl.program_id(2)
    column = pl.program_id(3)
    count = query.shape[0]
    place = Sequence(
        first=first[sequence],
        length=lens[sequence],
        first_row=row * count,
        first_key=column * key.shape[0],
    )
    softmax = Softmax(*memory)

    def begin() -> None:
        softmax.begin(LOWEST)

    def update() -> None:
        scores = _scores(query[...], key[...], settings)
        seen = _seen(scores.shape, place, settings, group)
        _update(softmax, scores, seen, _filled(value[...], place))

    def finish() -> None:
        # A row that sees no key has a total of zero, and a weighted sum of zeros.
        total = jnp.maximum(softmax.total[...], 1e-30)
        attended = softmax.weighted[...] / total
        out[...] = attended.astype(out.dtype)

    last_row = (row + 1) * count - 1
    last_position = place.first + last_row // group
    is_within = place.first_key < place.length
    is_seen = is_within & (place.first_key <= last_position)
    last_column = pl.num_programs(3) - 1
    pl.when(column == 0)(begin)
    pl.when(is_seen)(update)
    pl.when(column == last_column)(finish)


def _update(softmax: Softmax, scores: jax.Array, seen: jax.Array, values: jax.Array) -> None:
    """Add the keys of a page that a row sees.

    Args:
        softmax: the state of the rows.
        scores: ``[rows, keys]``.
        seen: ``[rows, keys]``, True if the row sees the key.
        values: ``[keys, size]``, none of them NaN.
    """
    masked = jnp.where(seen, scores, LOWEST)
    highest = softmax.highest_with(masked)
    # Not exp of the masked scores: in a row that sees nothing, they equal the highest one.
    weights = jnp.where(seen, jnp.exp(scores - highest), 0.0)
    softmax.add(highest, weights, values)


def _scores(query: jax.Array, key: jax.Array, settings: Settings) -> jax.Array:
    scores = dot(query, key.T) * settings.scale
    cap = settings.logits_soft_cap
    if cap is None:
        return scores
    return cap * jnp.tanh(scores / cap)


def _seen(shape: tuple[int, ...], place: Sequence, settings: Settings, group: int) -> jax.Array:
    """Return ``[rows, keys]``: True if the row's token attends to the key."""
    keys = place.first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    rows = place.first_row + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    # The rows of a token follow one another: one for each head of the group.
    positions = place.first + rows // group
    distance = positions - keys
    seen = (keys < place.length) & (distance >= 0)

    if settings.sliding_window is not None:
        seen &= distance < settings.sliding_window
    return seen


def _filled(value: jax.Array, place: Sequence) -> jax.Array:
    """Return the values of a page, with zeros behind the sequence's end, where NaN may lie."""
    keys = place.first_key + jax.lax.broadcasted_iota(jnp.int32, value.shape, 0)
    return jnp.where(keys < place.length, value, 0)
