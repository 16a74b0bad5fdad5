"""The share of blocks and of states in the memory of a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

from opgraft.config import OpgraftConfig
from opgraft.engine.runner.cache_layout import CacheSizes
from opgraft.errors import ConfigError

STATES_SHARE = 0.5
"""Share of the cache for states, at most, in models with blocks too."""

STATES_PER_REQUEST = 2
"""The state of the request, and a copy for requests with the same beginning."""


class Room(NamedTuple):
    """The sizes of a cache: blocks for keys and values, and slots for states of sequences."""

    num_blocks: int
    num_states: int


def smallest_room(
    ranks: Sequence[CacheSizes], config: OpgraftConfig, cache_bytes: Callable[[], list[int]]
) -> Room:
    """Return the sizes of a cache for which every rank has room. Ranks may have different layers.

    Args:
        ranks: cache sizes of each rank.
        config: resolved.
        cache_bytes: returns the bytes for the cache of each rank. Not called if settings give all
            sizes.

    Raises:
        ConfigError: as of ``room_for``.
    """
    # Workers are asked once, at the first rank that needs the answer.
    there = cache(cache_bytes)
    blocks = []
    states = []
    for rank, sizes in enumerate(ranks):
        room = room_for(sizes, config, partial(_at, there, rank))
        if sizes.bytes_per_block:
            blocks.append(room.num_blocks)
        if sizes.bytes_per_state:
            states.append(room.num_states)
    return Room(min(blocks, default=0), min(states, default=0))


def _at(numbers: Callable[[], list[int]], place: int) -> int:
    return numbers()[place]


def room_for(sizes: CacheSizes, config: OpgraftConfig, cache_bytes: Callable[[], int]) -> Room:
    """Return the numbers of blocks and states, from settings or from the memory.

    Args:
        sizes: of the cache.
        config: resolved.
        cache_bytes: returns the bytes for the cache. Not called if settings give all sizes.

    Raises:
        ConfigError: there is no room for a single state, or the size is given twice.
    """
    given = config.cache
    if given.num_blocks is not None and given.memory_bytes is not None:
        raise ConfigError(
            f"cache.num_blocks is {given.num_blocks} and cache.memory_bytes {given.memory_bytes}, "
            "and both say how large the cache is: leave one out"
        )
    wanted = 0
    if sizes.bytes_per_state:
        wanted = given.num_states or STATES_PER_REQUEST * (config.scheduler.max_num_seqs or 1)
    if not sizes.bytes_per_block:
        return Room(0, given.num_states or _affordable(sizes, wanted, cache_bytes()))
    if given.num_blocks:
        return Room(given.num_blocks, wanted)
    there = cache_bytes()
    states = wanted
    if not given.num_states:
        states = _affordable(sizes, wanted, int(there * STATES_SHARE))
    left = max(0, there - states * sizes.bytes_per_state)
    return Room(left // sizes.bytes_per_block, states)


def _affordable(sizes: CacheSizes, wanted: int, there: int) -> int:
    """Return the number of wanted states that fit into ``there`` bytes."""
    if not wanted:
        return 0
    size = sizes.bytes_per_state
    if size > there:
        raise ConfigError(
            f"the cache has {there} bytes for states of sequences, and one takes {size}: raise "
            "cache.memory_bytes or cache.memory_share, or set cache.num_states"
        )
    return min(wanted, there // size)
