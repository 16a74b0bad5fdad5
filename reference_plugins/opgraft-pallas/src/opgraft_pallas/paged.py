"""Attention over keys and values in pages (Kwon et al., arXiv:2309.06180) with an online softmax (arXiv:1805.02867).

A program of the grid holds rows of one sequence that share a key head, and walks the pages of the sequence: the table
is known before a page is fetched, and pages that no row sees are not. Its numbers were checked in Pallas's interpreter
on a CPU, and jax lowers it for a TPU; it has not been run on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opgraft_pallas.kernel import BLOCK, dot

LOWEST = -1e30
"""Of scores; finite, as a row may see nothing of a page."""


class Settings(NamedTuple):
    """The settings of a layer, as of ``opgraft.ops.attention.Attention``."""

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None


@functools.cache
def paged_attention(settings: Settings, interpret: bool) -> Callable[..., Any]:
    """Build a function of what ``PaddedAttention.attend_rows`` takes; the same one for the same arguments.

    The query is ``[S, T, H, D]``, the cache ``[N, 2, K, B, D]``, the table ``[S, W]``; ``K`` divides ``H``.
    """

    def attend(
        query: jax.Array, cache: jax.Array, table: jax.Array, first: jax.Array, lens: jax.Array
    ) -> jax.Array:
        sequences, tokens, heads, size = query.shape
        kv_heads, block_size, group = cache.shape[2], cache.shape[3], heads // cache.shape[2]
        rows = query.reshape(sequences, tokens, kv_heads, group, size).transpose(0, 2, 1, 3, 4)
        rows = rows.reshape(sequences, kv_heads, tokens * group, size)
        # What a matrix unit takes, or what there is.
        step = min(BLOCK, -(-tokens * group // 16) * 16)
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % step), (0, 0)))

        def page(kind: int) -> Any:
            def place(
                sequence: Any, head: Any, _: Any, column: Any, table: Any, first: Any, lens: Any
            ) -> Any:
                # Unseen pages are the last one, once more.
                last = jnp.maximum(lens[sequence] - 1, 0) // block_size
                return table[sequence, jnp.minimum(column, last)], kind, head, 0, 0

            return pl.BlockSpec((None, None, None, block_size, size), place)

        own = pl.BlockSpec(
            (None, None, step, size),
            lambda sequence, head, row, column, *_: (sequence, head, row, 0),
        )
        call = pl.pallas_call(
            functools.partial(_step, settings=settings, group=group),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(sequences, kv_heads, rows.shape[2] // step, table.shape[1]),
                in_specs=[own, page(0), page(1)],
                out_specs=own,
                scratch_shapes=[pltpu.VMEM((step, width), jnp.float32) for width in (1, 1, size)],
            ),
            out_shape=jax.ShapeDtypeStruct(rows.shape, query.dtype),
            interpret=interpret,
        )
        attended = call(table, first, lens, rows, cache, cache)[:, :, : tokens * group]
        attended = attended.reshape(sequences, kv_heads, tokens, group, size).transpose(
            0, 2, 1, 3, 4
        )
        result: jax.Array = attended.reshape(query.shape)
        return result

    return attend


def _step(
    table: Any,
    first: Any,
    lens: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    highest: Any,
    total: Any,
    weighted: Any,
    *,
    settings: Settings,
    group: int,
) -> None:
    """Attend to one page. The last three tensors hold over the pages what softmax needs: maximum, sum, result."""
    sequence, row, column = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    start, length, (count, _) = column * key.shape[0], lens[sequence], query.shape
    last = first[sequence] + ((row + 1) * count - 1) // group

    def begin() -> None:
        highest[...] = jnp.full_like(highest, LOWEST)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    def update() -> None:
        scores = dot(query[...], key[...].T) * settings.scale
        if settings.logits_soft_cap is not None:
            scores = settings.logits_soft_cap * jnp.tanh(scores / settings.logits_soft_cap)
        keys = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        rows = row * count + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        behind = first[sequence] + rows // group - keys
        seen = (keys < length) & (behind >= 0)
        if settings.sliding_window is not None:
            seen &= behind < settings.sliding_window
        new_highest = jnp.maximum(
            highest[...], jnp.where(seen, scores, LOWEST).max(axis=1, keepdims=True)
        )
        weights = jnp.where(seen, jnp.exp(scores - new_highest), 0.0)
        fading = jnp.exp(highest[...] - new_highest)
        # The rest may be NaN.
        filled = start + jax.lax.broadcasted_iota(jnp.int32, value.shape, 0) < length
        total[...] = total[...] * fading + weights.sum(axis=1, keepdims=True)
        weighted[...] = weighted[...] * fading + dot(weights, jnp.where(filled, value[...], 0))
        highest[...] = new_highest

    def finish() -> None:
        out[...] = (weighted[...] / jnp.maximum(total[...], 1e-30)).astype(out.dtype)

    pl.when(column == 0)(begin)
    pl.when((start < length) & (start <= last))(update)
    pl.when(column == pl.num_programs(3) - 1)(finish)
