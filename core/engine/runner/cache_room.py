"""The share of blocks and of states in the memory of a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

from opgraft.config import OpgraftConfig
from opgraft.engine.runner.cache_layout import CacheSizes
from opgraft.errors import ConfigError

STATES_SHARE = 0.5
"""Of the cache, at most, for the states of models that have blocks too."""

STATES_PER_REQUEST = 2
"""Its own state, and one that a request which begins alike finds."""


class Room(NamedTuple):
    """The sizes of a cache: blocks for keys and values, and slots for states of sequences."""

    num_blocks: int
    num_states: int


def smallest_room(
    ranks: Sequence[CacheSizes], config: OpgraftConfig, cache_bytes: Callable[[], list[int]]
) -> Room:
    """Return what the caches of all ranks have room for, each with the layers that it has.

    Args:
        ranks: of each rank.
        config: resolved.
        cache_bytes: returns the bytes that the cache of each rank may take; not called where
            settings say all.

    Raises:
        ConfigError: as of ``room_for``.
    """
    there = cache(cache_bytes)
    rooms = [room_for(sizes, config, partial(_at, there, rank)) for rank, sizes in enumerate(ranks)]
    blocks = [
        room.num_blocks for sizes, room in zip(ranks, rooms, strict=True) if sizes.bytes_per_block
    ]
    states = [
        room.num_states for sizes, room in zip(ranks, rooms, strict=True) if sizes.bytes_per_state
    ]
    return Room(min(blocks, default=0), min(states, default=0))


def _at(numbers: Callable[[], list[int]], place: int) -> int:
    return numbers()[place]


def room_for(sizes: CacheSizes, config: OpgraftConfig, cache_bytes: Callable[[], int]) -> Room:
    """Return what a cache has room for, as set or as memory allows.

    Args:
        sizes: of the cache.
        config: resolved.
        cache_bytes: returns the bytes that the cache may take; not called where settings say all.

    Raises:
        ConfigError: there is no room for a single state, or the size is given twice.
    """
    given, wanted = config.cache, 0
    if given.num_blocks is not None and given.memory_bytes is not None:
        raise ConfigError(
            f"cache.num_blocks is {given.num_blocks} and cache.memory_bytes {given.memory_bytes}, and both say how "
            "large the cache is: leave one out"
        )
    if sizes.bytes_per_state:
        wanted = given.num_states or STATES_PER_REQUEST * (config.scheduler.max_num_seqs or 1)
    if not sizes.bytes_per_block:
        return Room(0, given.num_states or _affordable(sizes, wanted, cache_bytes()))
    if given.num_blocks:
        return Room(given.num_blocks, wanted)
    there = cache_bytes()
    states = wanted if given.num_states else _affordable(sizes, wanted, int(there * STATES_SHARE))
    return Room(max(0, there - states * sizes.bytes_per_state) // sizes.bytes_per_block, states)


def _affordable(sizes: CacheSizes, wanted: int, there: int) -> int:
    """Return how many of the states that are wanted fit."""
    if not wanted:
        return 0
    size = sizes.bytes_per_state
    if size > there:
        raise ConfigError(
            f"the cache has {there} bytes for states of sequences, and one takes {size}: raise cache.memory_bytes or "
            "cache.memory_share, or set cache.num_states"
        )
    return min(wanted, there // size)
