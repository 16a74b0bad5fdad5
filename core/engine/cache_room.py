"""The share of blocks and of states in the memory of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from opgraft.config import OpgraftConfig
from opgraft.engine.cache_layout import CacheLayout
from opgraft.errors import ConfigError

STATES_SHARE = 0.5
"""Of the cache, at most, for the states of models that have blocks too."""

STATES_PER_REQUEST = 2
"""Its own state, and one that a request which begins alike finds."""


class Room(NamedTuple):
    """The sizes of a cache: blocks for keys and values, and slots for states of sequences."""

    num_blocks: int
    num_states: int


def room_for(layout: CacheLayout, config: OpgraftConfig, cache_bytes: Callable[[], int]) -> Room:
    """Return what a cache has room for, as set or as memory allows.

    Args:
        layout: of the model.
        config: resolved.
        cache_bytes: returns the bytes that the cache may take; not called where settings say all.

    Raises:
        ConfigError: there is no room for a single state, or the size is given twice.
    """
    cache, wanted = config.cache, 0
    if cache.num_blocks is not None and cache.memory_bytes is not None:
        raise ConfigError(
            f"cache.num_blocks is {cache.num_blocks} and cache.memory_bytes {cache.memory_bytes}, and both say how "
            "large the cache is: leave one out"
        )
    if layout.states:
        wanted = cache.num_states or STATES_PER_REQUEST * (config.scheduler.max_num_seqs or 1)
    if not layout.layers:
        return Room(0, cache.num_states or _affordable(layout, wanted, cache_bytes()))
    if cache.num_blocks:
        return Room(cache.num_blocks, wanted)
    there = cache_bytes()
    states = wanted if cache.num_states else _affordable(layout, wanted, int(there * STATES_SHARE))
    return Room(max(0, there - states * layout.bytes_per_state) // layout.bytes_per_block, states)


def _affordable(layout: CacheLayout, wanted: int, there: int) -> int:
    """Return how many of the states that are wanted fit."""
    if not wanted:
        return 0
    size = layout.bytes_per_state
    if size > there:
        raise ConfigError(
            f"the cache has {there} bytes for states of sequences, and one takes {size}: raise cache.memory_bytes or "
            "cache.memory_share, or set cache.num_states"
        )
    return min(wanted, there // size)
