"""The pool of blocks, and the tables that the cache manager makes of it."""

from __future__ import annotations

import os
import subprocess

import pytest
from opgraft import SamplingParams
from opgraft.engine.request import Request
from opgraft.engine.schedule.blocks import BlockPool
from opgraft.engine.schedule.kv_cache import KVCacheManager, LayerKind
from opgraft.errors import RequestError


def compute(cache: KVCacheManager, request: Request, count: int | None = None) -> None:
    """Compute the next tokens of a request, all that are missing by default."""
    start = request.num_computed
    count = request.num_tokens - start if count is None else count
    assert cache.extend(request, count) is not None
    request.num_computed += count
    cache.computed(request, start)


def opened(cache: KVCacheManager, name: str, tokens: list[int]) -> Request:
    request = Request(name, tokens, SamplingParams())
    prefix = cache.longest_prefix(request)
    cache.open(request, prefix)
    request.num_computed = prefix.num_tokens
    return request


def test_the_block_unused_for_longest_is_reused_first() -> None:
    """Blocks without content go first, then those freed first, and of a sequence the last before the first."""
    pool = BlockPool(6)
    older, newer, empty = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    for block in (*older, *newer):
        pool.keep(block, f"content of {block}")
    for blocks in (older, newer, empty):
        pool.free(blocks)
    order = [pool.allocate(1)[0] for _ in range(6)]
    assert set(order[:2]) == set(empty)
    assert order[2:] == [older[1], older[0], newer[1], newer[0]]


def test_a_block_that_is_found_and_shared_is_not_reused() -> None:
    """Content stays until its block is allocated; a share takes the block out of the free ones."""
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.keep(block, "content")
    pool.free([block])
    assert pool.lookup(["content", "other"]) == [block, None]
    pool.share([block])
    assert (pool.num_free, pool.references(block)) == (1, 1)
    assert pool.allocate(1) != [block]
    pool.free([block])
    assert pool.allocate(1) == [block]
    assert pool.lookup(["content"]) == [None]


def test_the_second_block_with_the_same_content_is_not_kept() -> None:
    """The first stays the one that is found, and losing the second loses nothing."""
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.keep(first, "content")
    pool.keep(second, "content")
    pool.free([second])
    pool.allocate(1)
    assert pool.lookup(["content"]) == [first]


def test_wrong_use_of_the_pool_is_an_error() -> None:
    """More than there is, and freeing twice, are told with the numbers."""
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    with pytest.raises(
        RequestError, match="2 blocks of the cache are allocated and 1 of 2 are free"
    ):
        pool.allocate(2)
    pool.free([block])
    with pytest.raises(RequestError, match=f"block {block} of the cache is freed twice"):
        pool.free([block])


def test_hashes_are_the_same_in_every_process(warm_python: str) -> None:
    """Blocks are known by hashes that depend on tokens and salt alone, not on the process's seed of hash()."""
    code = (
        "from opgraft.engine.schedule.kv_cache import *; from opgraft import SamplingParams\n"
        "c, r = KVCacheManager([LayerKind()], 4, 4), Request('a', range(9), SamplingParams(), cache_salt='s')\n"
        "c.longest_prefix(r); print([h.hex() for h in r.block_hashes], hash('s'))"
    )
    # Without the variable each process draws a seed of its own, the warm one too.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    printed = subprocess.run(
        [warm_python, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    told, _, seeded = printed.stdout.rpartition(" ")
    cache, request = (
        KVCacheManager([LayerKind()], 4, 4),
        Request("a", range(9), SamplingParams(), cache_salt="s"),
    )
    cache.longest_prefix(request)
    assert hash("s") != int(seeded)
    assert len(request.block_hashes) == 2
    assert told == str([each.hex() for each in request.block_hashes])


def test_no_salt_is_a_block() -> None:
    """A salt that is made of another prompt's bytes finds nothing of it."""
    cache = KVCacheManager([LayerKind()], 4, 4)
    secret, following = Request("a", range(9), SamplingParams()), range(4, 9)
    cache.longest_prefix(secret)
    for before in ("", "block"):
        made_up = before + "\0" * 32 + "".join(chr(token) + "\0" * 7 for token in range(4))
        guess = Request("b", following, SamplingParams(), cache_salt=made_up)
        cache.longest_prefix(guess)
        assert not {*guess.block_hashes} & {*secret.block_hashes}


def test_blocks_before_a_window_are_given_back() -> None:
    """A sequence of any length uses the blocks that its window covers; the next token still finds them all."""
    kind = LayerKind(6)
    cache = KVCacheManager([kind], 5, 4)
    request = opened(cache, "a", list(range(100)))
    for _ in range(25):
        compute(cache, request, 4)
        assert 5 - cache.pool.num_free <= kind.most_blocks(100, 4, 4) == 4
    cache.close(request)
    assert cache.pool.num_free == 5


def test_layers_of_two_kinds_have_blocks_of_their_own() -> None:
    """A block is found again by layers of the kind that wrote it only, and both kinds must have what they need."""
    cache = KVCacheManager([LayerKind(), LayerKind(6)], 40, 4)
    first = opened(cache, "a", list(range(20)))
    compute(cache, first)
    again = opened(cache, "b", list(range(20)))
    assert again.num_computed == 16
    full, window = cache.blocks(again)
    assert (full[:4], window[2:4]) == (cache.blocks(first)[0][:4], cache.blocks(first)[1][2:4])
    assert window[:2] == (0, 0), "before the window nothing is needed"
    assert not set(full) & set(window[2:])


def test_a_window_needs_its_own_blocks_of_a_prefix_only() -> None:
    """Where the blocks before the window are gone, the prefix is found; where one in it is gone, a shorter one is."""
    cache = KVCacheManager([LayerKind(6)], 12, 4)
    first = opened(cache, "a", list(range(40)))
    compute(cache, first)
    blocks = cache.blocks(first)[0]
    cache.close(first)
    cache.pool.share(blocks[6:])
    cache.pool.allocate(cache.pool.num_free)  # all others are written anew
    assert cache.longest_prefix(Request("b", list(range(40)), SamplingParams())).num_tokens == 36
    cache.pool.free(blocks[8:9])
    cache.pool.allocate(1)
    assert cache.longest_prefix(Request("c", list(range(40)), SamplingParams())).num_tokens == 32


def test_nothing_is_found_that_is_not_computed_yet() -> None:
    """A block is known once all its tokens are computed, not when it is given to a sequence."""
    cache = KVCacheManager([LayerKind()], 12, 4)
    first = opened(cache, "a", list(range(12)))
    cache.extend(first, 12)
    assert opened(cache, "b", list(range(12))).num_computed == 0
    first.num_computed = 7
    cache.computed(first, 0)
    assert opened(cache, "c", list(range(12))).num_computed == 4


def test_a_window_that_slid_on_has_no_common_prefix() -> None:
    """A parent that gave blocks of the prompt back cannot share the prompt."""
    cache = KVCacheManager([LayerKind(3)], 20, 2)
    parent = opened(cache, "a", list(range(8)))
    compute(cache, parent)
    child = Request("b", list(range(8)), SamplingParams(), parent="a")
    assert cache.common_prefix(child, parent) is not None
    for _ in range(6):
        parent.append(9, 100)
        compute(cache, parent)
    assert cache.common_prefix(child, parent) is None


def test_an_extension_is_whole_or_nothing() -> None:
    """Where one kind would get its blocks and the other not, none gets any."""
    cache = KVCacheManager([LayerKind(), LayerKind(99)], 3, 4)
    request = opened(cache, "a", list(range(20)))
    compute(cache, request, 4)
    assert cache.extend(request, 4) is None
    assert (cache.pool.num_free, [len(blocks) for blocks in cache.blocks(request)]) == (1, [1, 1])
