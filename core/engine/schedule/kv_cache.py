"""The cache of keys and values, as tables of blocks: one table per sequence and kind of layers.

Nothing here touches a tensor: a block is a number, and what lies in it is the runner's and the
attention's matter.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.engine.request import Request
from opgraft.engine.schedule.blocks import BlockPool
from opgraft.engine.schedule.state_slots import StateSlots
from opgraft.engine.step import Blocks


@dataclass(frozen=True)
class LayerKind:
    """Layers that keep the same tokens: all, or the last ``sliding_window``, the current one included."""

    sliding_window: int | None = None

    def first_kept(self, num_computed: int, block_size: int) -> int:
        """Return the first block that the token after ``num_computed`` ones still attends to."""
        if self.sliding_window is None:
            return 0
        return max(num_computed + 1 - self.sliding_window, 0) // block_size

    def most_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the most blocks in use at once, if ``num_tokens`` are computed in steps of at most ``chunk``."""
        whole = -(-num_tokens // block_size)
        if self.sliding_window is None:
            return whole
        return min(whole, -(-(self.sliding_window - 1 + chunk) // block_size) + 1)


class Prefix(NamedTuple):
    """The computed beginning of a sequence, as blocks of the cache.

    Attributes:
        num_tokens: its length.
        blocks: for each kind the full blocks that the next token attends to; those before it are
            not needed.
        partial: for each kind the block whose first tokens are to be copied; empty where all blocks
            are full. With a state it is free, and taken over as it is.
        state: slot of the state after it, where layers keep states.
    """

    num_tokens: int
    blocks: Sequence[Sequence[int]]
    partial: Sequence[int] = ()
    state: int | None = None


class _Lack(NamedTuple):
    """A sequence that did not fit, in numbers that tell at a glance whether it may by now.

    Attributes:
        request: of the sequence.
        needed: blocks that it takes of the free ones, those aside that others used already.
        revived: of the pool at that moment. Each block that came into use since may be one that it
            needs no more.
        absent: keys of the blocks that would make its prefix longer, as far as the pool had none of
            them.
    """

    request: Request
    needed: int
    revived: int
    absent: Sequence[Hashable]


class _Table:
    """Blocks of one sequence and kind by position; the first ``dropped`` are out of the window, and given back."""

    __slots__ = ("blocks", "dropped")

    def __init__(self, dropped: int, blocks: Sequence[int]) -> None:
        self.dropped = dropped
        self.blocks = [0] * dropped + list(blocks)

    def held(self) -> list[int]:
        return self.blocks[self.dropped :]


@PluggableClass.register("kv_cache_manager")
class KVCacheManager(PluggableClass):
    """Tables of blocks from one pool, and the beginnings of sequences that are found in it again.

    A full block is known by a hash of its tokens and of everything before them, chained from block
    to block, of the request's salt, and of the ways in which its keys are rotated. It is SHA-256:
    whoever could make two beginnings collide could read another tenant's.

    Args:
        kinds: of the model's layers; each has a table, and blocks of its own in it.
        num_blocks: blocks of the pool, which all kinds draw from.
        block_size: tokens in a block.
        prefix_reuse: find blocks of earlier sequences that begin alike.
        num_states: slots for states, one for each sequence that runs and the others for copies; 0
            for models whose layers keep none.
        opgraft_config: all settings, for subclasses; the built-in defaults if not given.

    Attributes:
        states: the slots; ``None`` for such models.
    """

    states: StateSlots | None

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        num_blocks: int,
        block_size: int,
        prefix_reuse: bool = True,
        num_states: int = 0,
        *,
        opgraft_config: OpgraftConfig | None = None,
    ) -> None:
        self.opgraft_config = (opgraft_config or OpgraftConfig()).resolved()
        self.kinds = tuple(kinds)
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self.num_blocks = num_blocks
        self.num_states = num_states
        self.clear()
        self.no_blocks: Blocks = ((),) * len(self.kinds)
        self.no_prefix = Prefix(0, self.no_blocks)

    def clear(self) -> None:
        """Forget all sequences and all contents."""
        self.pool = BlockPool(self.num_blocks)
        self.states = StateSlots(self.num_states) if self.num_states else None
        self._tables: dict[str, list[_Table]] = {}
        self._lack: _Lack | None = None

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Return the most blocks that a sequence uses at once, if it is computed in steps of at most ``chunk``."""
        return sum(kind.most_blocks(num_tokens, chunk, self.block_size) for kind in self.kinds)

    def blocks(self, request: Request) -> Blocks:
        """Return the whole tables of a sequence."""
        return tuple(tuple(table.blocks) for table in self._tables[request.request_id])

    def longest_prefix(self, request: Request) -> Prefix:
        """Find the longest beginning of a sequence that is in the cache, short of its last token.

        Of a kind with a sliding window only the blocks in the window need to be there. Where layers
        keep states, that of its end does.
        """
        if not self.prefix_reuse:
            return self.no_prefix
        if (
            self.states
            and request.num_preemptions
            and (left := self._left(request, self.states)) is not None
        ):
            return left
        count = (request.num_tokens - 1) // self.block_size
        self._hash(request, count)
        hashes = request.block_hashes[:count]
        found = [
            self.pool.lookup((kind, digest) for digest in hashes) for kind in range(len(self.kinds))
        ]
        length, state = self._covered(found, count), None
        while self.states and length and (state := self.states.find(hashes[length - 1])) is None:
            length = self._covered(found, length - 1)
        return self._prefix(length * self.block_size, found, (), state)

    def leave(self, request: Request) -> None:
        """Have a sequence that is preempted find all that it has computed when it comes back, if it is still there.

        At the end of a block that would be so without this. Its state, and what it has of a block
        that is not full, are kept under the hash of all its tokens.
        """
        full, rest = divmod(request.num_computed, self.block_size)
        if not (self.states and self.prefix_reuse and request.num_computed):
            return
        digest = self._digest(request, request.num_computed)
        for kind, table in enumerate(self._tables[request.request_id] if rest else ()):
            self.pool.keep(table.blocks[full], (kind, digest))
        self.states.leave(request.request_id, digest)

    def _left(self, request: Request, states: StateSlots) -> Prefix | None:
        """Find all but the last token of a sequence, as it has left them in the middle of a block."""
        full, rest = divmod(request.num_tokens - 1, self.block_size)
        digest = self._digest(request, request.num_tokens - 1) if rest else b""
        if not rest or (state := states.find(digest)) is None:
            return None
        kinds = range(len(self.kinds))
        partial = [
            block
            for block in self.pool.lookup((kind, digest) for kind in kinds)
            if block is not None
        ]
        found = [
            self.pool.lookup((kind, each) for each in request.block_hashes[:full]) for kind in kinds
        ]
        if (
            len(partial) < len(kinds)
            or any(map(self.pool.references, partial))
            or self._covered(found, full) < full
        ):
            return None
        return self._prefix(request.num_tokens - 1, found, partial, state)

    def _prefix(
        self,
        num_tokens: int,
        found: Sequence[Sequence[int | None]],
        partial: Sequence[int],
        state: int | None,
    ) -> Prefix:
        """Return the beginning of so many tokens with those of its blocks that are needed, all of which were found."""
        full = num_tokens // self.block_size
        kept = [
            blocks[first:full]
            for blocks, first in zip(found, self._first_kept(num_tokens), strict=True)
        ]
        return Prefix(
            num_tokens, [[b for b in blocks if b is not None] for blocks in kept], partial, state
        )

    def _covered(self, found: Sequence[Sequence[int | None]], length: int) -> int:
        """Return the most blocks, at most ``length``, of which each kind has found those that are needed.

        Where one is missing, every length that needs it is out: the next to try ends before it.
        """
        while gaps := [
            blocks.index(None, first, length)
            for blocks, first in zip(found, self._first_kept(length * self.block_size), strict=True)
            if None in blocks[first:length]
        ]:
            length = min(gaps)
        return length

    def _first_kept(self, num_tokens: int) -> list[int]:
        return [kind.first_kept(num_tokens, self.block_size) for kind in self.kinds]

    def common_prefix(self, request: Request, parent: Request) -> Prefix | None:
        """Return the prompt short of its last token as the blocks of a ``parent`` that has computed the same prompt.

        ``None`` where the parent holds a part of it no longer, as a window has slid or a state has
        gone on.
        """
        if self.states:
            return None
        full, rest = divmod(len(request.prompt) - 1, self.block_size)
        tables = self._tables[parent.request_id]
        first = self._first_kept(len(request.prompt) - 1)
        if any(table.dropped > block for table, block in zip(tables, first, strict=True)):
            return None
        blocks = [table.blocks[block:full] for table, block in zip(tables, first, strict=True)]
        partial = [table.blocks[full] for table in tables] if rest else []
        return Prefix(len(request.prompt) - 1, blocks, partial)

    def num_held(self, request: Request) -> int:
        """Return how many blocks a sequence uses, those that it shares included."""
        return sum(len(table.blocks) - table.dropped for table in self._tables[request.request_id])

    def fits(self, request: Request, prefix: Prefix, chunk: int, reserve: int) -> bool:
        """Tell whether the whole sequence so far fits after ``prefix``, and leaves ``reserve`` blocks free."""
        in_use = sum(
            self.pool.references(block) > 0 for blocks in prefix.blocks for block in blocks
        )
        needed = self.most_blocks(request.num_tokens, chunk) - in_use
        if needed + reserve <= self.pool.num_free:
            return True
        full = prefix.num_tokens // self.block_size
        longer = [
            (kind, each)
            for each in request.block_hashes[full : full + 1]
            for kind in range(len(self.kinds))
        ]
        absent = [key for key in longer if not self.pool.holds(key)]
        self._lack = _Lack(request, needed, self.pool.revived, absent)
        return False

    def still_lacks(self, request: Request, reserve: int) -> bool:
        """Tell, in the same time for any length, that a waiting sequence which did not fit does not fit yet.

        Where this is not certain, the answer is no, and ``fits`` has the right one.
        """
        lack = self._lack
        if lack is None or lack.request is not request:
            return False
        least = lack.needed - (self.pool.revived - lack.revived)
        return least + reserve > self.pool.num_free and not any(map(self.pool.holds, lack.absent))

    def open(self, request: Request, prefix: Prefix) -> tuple[tuple[int, int], ...]:
        """Give a sequence its tables, which begin with ``prefix``, and return the copies to make of partial blocks."""
        self._lack = None
        if self.states:
            self.states.open(request.request_id, prefix.state)
        for blocks in prefix.blocks:
            self.pool.share(blocks)
        adopted = prefix.state is not None
        own = (
            list(map(self.pool.adopt, prefix.partial))
            if adopted
            else self.pool.allocate(len(prefix.partial))
        )
        full = prefix.num_tokens // self.block_size
        tables = [_Table(full - len(blocks), blocks) for blocks in prefix.blocks]
        for table, block in zip(tables, own, strict=False):
            table.blocks.append(block)
        self._tables[request.request_id] = tables
        return () if adopted else tuple(zip(prefix.partial, own, strict=True))

    def extend(self, request: Request, count: int) -> Blocks | None:
        """Append blocks for the next ``count`` tokens, and return them; ``None``, and nothing, where too few are free.

        Blocks that slid out of a window are given back before.
        """
        tables = self._tables[request.request_id]
        if not tables:
            return self.no_blocks
        missing = -(-(request.num_computed + count) // self.block_size) - len(tables[0].blocks)
        if missing <= 0:
            return self.no_blocks
        self._drop(tables, request.num_computed)
        if missing * len(tables) > self.pool.num_free:
            return None
        new = tuple(tuple(self.pool.allocate(missing)) for _ in tables)
        for table, blocks in zip(tables, new, strict=True):
            table.blocks += blocks
        return new

    def _drop(self, tables: Sequence[_Table], num_computed: int) -> None:
        for kind, table in zip(self.kinds, tables, strict=True):
            first = kind.first_kept(num_computed, self.block_size)
            if first > table.dropped:
                self.pool.free(table.blocks[table.dropped : first])
                table.dropped = first

    def computed(self, request: Request, start: int) -> None:
        """Have the blocks found that became full when the tokens from ``start`` to ``num_computed`` were computed."""
        first, last = start // self.block_size, request.num_computed // self.block_size
        if first == last or not self.prefix_reuse:
            return
        self._hash(request, last)
        for kind, table in enumerate(self._tables[request.request_id]):
            for index in range(first, last):
                self.pool.keep(table.blocks[index], (kind, request.block_hashes[index]))
        if (
            self.states
            and start < len(request.prompt)
            and not request.num_computed % self.block_size
        ):
            self.states.keep(request.request_id, request.block_hashes[last - 1])

    def chunk(self, request: Request, start: int, count: int) -> int:
        """Return how many of the next ``count`` tokens are to be computed before a state is copied, at least one.

        Of a prompt that is the end of the last full block among them, short of the last token.
        """
        if not (self.states and self.prefix_reuse and start < len(request.prompt)):
            return count
        end = min(start + count, request.num_tokens - 1) // self.block_size * self.block_size
        return end - start if end > start else count

    def discard(self, request: Request) -> None:
        """Have nothing of a sequence found any more that failed by what it computed: NaN is in its blocks, perhaps."""
        self.pool.discard(
            (kind, digest) for kind in range(len(self.kinds)) for digest in request.block_hashes
        )
        if self.states:
            self.states.pool.discard(request.block_hashes)

    def close(self, request: Request) -> None:
        """Give the blocks of a sequence back; they keep their contents until they are needed."""
        for table in self._tables.pop(request.request_id):
            self.pool.free(table.held())
        if self.states:
            self.states.close(request.request_id)

    def _digest(self, request: Request, count: int) -> bytes:
        """Return the hash of a request's first ``count`` tokens; of full blocks, that of the last."""
        full, rest = divmod(count, self.block_size)
        self._hash(request, full)
        before = request.block_hashes[full - 1] if full else _root(request)
        tokens = array("q", request.tokens(full * self.block_size, count))
        return sha256(b"part" + before + tokens.tobytes()).digest() if rest else before

    def _hash(self, request: Request, count: int) -> None:
        """Have the hashes of a request's first ``count`` blocks, all full; those that are known stay."""
        hashes = request.block_hashes
        for index in range(len(hashes), count):
            before = hashes[-1] if hashes else _root(request)
            tokens = array(
                "q", request.tokens(index * self.block_size, (index + 1) * self.block_size)
            )
            hashes.append(sha256(b"block" + before + tokens.tobytes()).digest())


def _root(request: Request) -> bytes:
    """Return what the first block's hash begins with, as long as a hash.

    Hashes of salts, rotations and blocks begin differently, so that no salt that somebody makes up
    is a block's.
    """
    salt = request.cache_salt
    root = bytes(sha256().digest_size)
    if salt is not None:
        root = sha256(b"salt" + salt.encode("utf-8", "surrogatepass")).digest()
    return (
        sha256(b"rotation" + root + array("q", request.rotation).tobytes()).digest()
        if any(request.rotation)
        else root
    )
