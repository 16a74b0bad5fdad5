"""The cache of keys and values, as tables of blocks: one table per sequence and group of layers.

Each group has a kind, and several groups may have the same kind.

Nothing here touches a tensor: a block is a number. The runner and the attention layers know the
tensors with the contents.

For example, a sequence of 40 tokens has blocks 7, 2 and 9 of 16 tokens each. Tokens 0 to 15 lie in
block 7, and token 39 is the eighth of block 9.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from sys import maxsize
from typing import NamedTuple, Protocol

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.engine.request import Request
from opgraft.engine.schedule.blocks import BlockPool
from opgraft.engine.schedule.state_slots import StateSlots
from opgraft.engine.step import Blocks


@dataclass(frozen=True)
class LayerKind:
    """The tokens that the layers of a group keep: all, or the last ``sliding_window`` ones.

    The current token is one of the window.
    """

    sliding_window: int | None = None

    def first_kept(self, num_computed: int, block_size: int) -> int:
        """Return the first block that the token after ``num_computed`` ones attends to."""
        if self.sliding_window is None:
            return 0
        return max(num_computed + 1 - self.sliding_window, 0) // block_size

    def most_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the most blocks in use at once for ``num_tokens`` in steps of ``chunk`` tokens."""
        whole = -(-num_tokens // block_size)
        if self.sliding_window is None:
            return whole
        seen_by_a_step = self.sliding_window - 1 + chunk
        # One more: the window may begin in the middle of a block.
        return min(whole, -(-seen_by_a_step // block_size) + 1)


class Prefix(NamedTuple):
    """The computed beginning of a sequence, as blocks of the cache.

    Attributes:
        num_tokens: length of the beginning.
        blocks: for each group, the full blocks that the next token attends to. Blocks before a
            window are not needed.
        partial: for each group, the block with the last tokens, to be copied; empty if all blocks
            are full. With a state the block is free, and used without a copy.
        state: slot of the state at the end, if layers keep states.
    """

    num_tokens: int
    blocks: Sequence[Sequence[int]]
    partial: Sequence[int] = ()
    state: int | None = None


class BlockStore(Protocol):
    """Keeps full blocks outside of the cache."""

    def note(self, digest: bytes, blocks: Sequence[int]) -> None:
        """Note a full block of each group, by the hash of the tokens up to its end."""

    def use(self, digests: Iterable[bytes]) -> None:
        """Note that a request has found blocks in the cache."""

    def clear(self) -> None:
        """Forget what was noted, as the cache has lost its contents."""

    def restore(self, request: Request) -> None:
        """Fill free blocks with the next ones of a request's beginning, as far as they are kept."""


class _Lack(NamedTuple):
    """Numbers of a waiting misfit, for a quick look whether there may be room by now.

    Attributes:
        request: of the sequence.
        needed: free blocks for the sequence.
        revived: of the pool at that moment. The sequence may share each block that came into use
            since then, and need one less.
        absent: keys of the next blocks of the prefix that were not in the pool.
    """

    request: Request
    needed: int
    revived: int
    absent: Sequence[Hashable]


class _Table:
    """Blocks of one sequence and group, by position.

    The first ``dropped`` blocks have left the window and are given back.
    """

    __slots__ = ("blocks", "dropped")

    def __init__(self, dropped: int, blocks: Sequence[int]) -> None:
        self.dropped = dropped
        self.blocks = [0] * dropped + list(blocks)

    def held(self) -> list[int]:
        return self.blocks[self.dropped :]


@PluggableClass.register("kv_cache_manager")
class KVCacheManager(PluggableClass):
    """Tables of blocks from one pool, with reuse of beginnings of earlier sequences.

    The key of a full block is a hash of its tokens and of everything before: hashes are chained
    from block to block, and begin with the request's salt, its adapter and the rotations of the
    keys. The hash is SHA-256: a person who makes two beginnings collide could read another tenant's
    cache.

    Args:
        kinds: of each group of the model's layers. A group has tables and blocks of its own.
        num_blocks: blocks of the pool, for all groups together.
        block_size: tokens in a block.
        prefix_reuse: find blocks of earlier sequences with the same beginning.
        num_states: slots for states, one for each running sequence and the rest for copies; 0 for
            models without such layers.
        opgraft_config: all settings, for subclasses; by default the built-in ones.

    Attributes:
        states: the slots; ``None`` for models without such layers.
        stored: blocks outside of the cache; ``None`` unless ``cache.store`` is set.
    """

    states: StateSlots | None
    stored: BlockStore | None = None

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
        if self.stored is not None:
            self.stored.clear()

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Return the most blocks of a sequence in use at once, in steps of ``chunk`` tokens."""
        return sum(kind.most_blocks(num_tokens, chunk, self.block_size) for kind in self.kinds)

    def blocks(self, request: Request) -> Blocks:
        """Return the whole tables of a sequence."""
        return tuple(tuple(table.blocks) for table in self._tables[request.request_id])

    def longest_prefix(self, request: Request) -> Prefix:
        """Return the longest beginning of a sequence in the cache, without the last token.

        The last token is computed in any case, for its logits. A group with a sliding window needs
        the blocks of the window only. Layers with states need the state at the end.
        """
        if not self.prefix_reuse:
            return self.no_prefix
        if self.states and request.num_preemptions:
            left = self._left(request, self.states)
            if left is not None:
                return left
        count = (request.num_tokens - 1) // self.block_size
        if self.stored is not None:
            self.stored.restore(request)
        hashes = self.hashes(request, count)
        found = self.found(hashes)
        length = self.covered(found, count)
        state = None
        # Shorter and shorter, until blocks and state are both there.
        while self.states and length:
            state = self.states.find(hashes[length - 1])
            if state is not None:
                break
            length = self.covered(found, length - 1)
        return self._prefix(length * self.block_size, found, (), state)

    def leave(self, request: Request) -> None:
        """Keep the state of a sequence before its preemption, and its last block, for its return.

        Their key is the hash of all computed tokens. So the sequence may go on at the same token.
        """
        if not (self.states and self.prefix_reuse and request.num_computed):
            return
        full, rest = divmod(request.num_computed, self.block_size)
        digest = self._digest(request, request.num_computed)
        if rest:
            for group, table in enumerate(self._tables[request.request_id]):
                self.pool.keep(table.blocks[full], (group, digest))
        self.states.keep_for_return(request.request_id, digest)

    def _left(self, request: Request, states: StateSlots) -> Prefix | None:
        """Return all but the last token of a sequence, as ``leave`` has kept them."""
        full, rest = divmod(request.num_tokens - 1, self.block_size)
        if not rest:
            # At the end of a block, longest_prefix finds the blocks and the state.
            return None
        digest = self._digest(request, request.num_tokens - 1)
        state = states.find(digest)
        if state is None:
            return None
        looked_up = self.found([digest])
        partial = [block for [block] in looked_up if block is not None]
        if len(partial) < len(self.kinds) or any(map(self.pool.references, partial)):
            return None
        found = self.found(request.block_hashes[:full])
        if self.covered(found, full) < full:
            return None
        return self._prefix(request.num_tokens - 1, found, partial, state)

    def found(self, hashes: Sequence[bytes]) -> list[list[int | None]]:
        """Return for each group the blocks with these hashes, or ``None`` for each."""
        groups = range(len(self.kinds))
        return [self.pool.lookup((group, digest) for digest in hashes) for group in groups]

    def _prefix(
        self,
        num_tokens: int,
        found: Sequence[Sequence[int | None]],
        partial: Sequence[int],
        state: int | None,
    ) -> Prefix:
        """Return the beginning of ``num_tokens`` tokens, with the needed blocks of ``found``."""
        full = num_tokens // self.block_size
        kept = []
        for blocks, first in zip(found, self.first_kept(num_tokens), strict=True):
            kept.append([block for block in blocks[first:full] if block is not None])
        return Prefix(num_tokens, kept, partial, state)

    def covered(self, found: Sequence[Sequence[int | None]], length: int) -> int:
        """Return the longest beginning, in blocks, for which every needed block was found.

        Args:
            found: for each group, the block at each position, or ``None``.
            length: blocks of the beginning, at most.
        """
        while True:
            first_kept = self.first_kept(length * self.block_size)
            gaps = []
            for blocks, first in zip(found, first_kept, strict=True):
                if None in blocks[first:length]:
                    gaps.append(blocks.index(None, first, length))
            if not gaps:
                return length
            # A longer beginning would need the missing block, too.
            length = min(gaps)

    def first_kept(self, num_tokens: int) -> list[int]:
        """Return for each group the first block that a token behind ``num_tokens`` attends to."""
        return [kind.first_kept(num_tokens, self.block_size) for kind in self.kinds]

    def common_prefix(self, request: Request, parent: Request) -> Prefix | None:
        """Return a prompt without its last token, as blocks of a parent with the same prompt.

        ``None`` if the parent no longer holds a part of the prompt: a window has moved on, or a
        state has changed.
        """
        if self.states:
            return None
        num_tokens = len(request.prompt) - 1
        full, rest = divmod(num_tokens, self.block_size)
        tables = self._tables[parent.request_id]
        needed = list(zip(tables, self.first_kept(num_tokens), strict=True))
        if any(table.dropped > first for table, first in needed):
            return None
        blocks = [table.blocks[first:full] for table, first in needed]
        partial = [table.blocks[full] for table in tables] if rest else []
        return Prefix(num_tokens, blocks, partial)

    def num_held(self, request: Request) -> int:
        """Return the number of blocks in use by a sequence, shared ones included."""
        return sum(len(table.blocks) - table.dropped for table in self._tables[request.request_id])

    def fits(self, request: Request, prefix: Prefix, chunk: int, reserve: int) -> bool:
        """Return True if the whole sequence so far fits, and leaves ``reserve`` blocks free.

        Args:
            request: of the sequence.
            prefix: beginning in the cache.
            chunk: tokens of a step, at most.
            reserve: blocks to leave free.
        """
        in_use = sum(
            self.pool.references(block) > 0 for blocks in prefix.blocks for block in blocks
        )
        needed = self.most_blocks(request.num_tokens, chunk) - in_use
        if needed + reserve <= self.pool.num_free:
            return True
        full = prefix.num_tokens // self.block_size
        absent = []
        for digest in request.block_hashes[full : full + 1]:
            keys = [(group, digest) for group in range(len(self.kinds))]
            absent += [key for key in keys if not self.pool.holds(key)]
        # For ``still_lacks``, which then answers without these sums.
        self._lack = _Lack(request, needed, self.pool.revived, absent)
        return False

    def still_lacks(self, request: Request, reserve: int) -> bool:
        """Return True if a waiting sequence that did not fit surely does not fit yet.

        This takes the same time for any length. If the answer is False, ask ``fits``.
        """
        lack = self._lack
        if lack is None or lack.request is not request:
            return False
        least = lack.needed - (self.pool.revived - lack.revived)
        if least + reserve <= self.pool.num_free:
            return False
        return not any(map(self.pool.holds, lack.absent))

    def open(self, request: Request, prefix: Prefix) -> tuple[tuple[int, int], ...]:
        """Give a sequence tables, beginning with ``prefix``. Return pairs of blocks to copy."""
        self._lack = None
        if self.stored is not None:
            self.stored.use(request.block_hashes[: prefix.num_tokens // self.block_size])
        if self.states:
            self.states.open(request.request_id, prefix.state)
        for blocks in prefix.blocks:
            self.pool.share(blocks)
        # A sequence that comes back takes its own partial blocks; others copy them.
        adopted = prefix.state is not None
        if adopted:
            own = [self.pool.adopt(block) for block in prefix.partial]
        else:
            own = self.pool.allocate(len(prefix.partial))
        full = prefix.num_tokens // self.block_size
        tables = [_Table(full - len(blocks), blocks) for blocks in prefix.blocks]
        for table, block in zip(tables, own, strict=False):
            table.blocks.append(block)
        self._tables[request.request_id] = tables
        return () if adopted else tuple(zip(prefix.partial, own, strict=True))

    def extend(self, request: Request, count: int) -> Blocks | None:
        """Append blocks for the next ``count`` tokens, and return them.

        Blocks before a window are given back first. If too few blocks are free, nothing is
        appended, and ``None`` is returned.
        """
        tables = self._tables[request.request_id]
        if not tables:
            return self.no_blocks
        needed = -(-(request.num_computed + count) // self.block_size)
        missing = needed - len(tables[0].blocks)
        if missing <= 0:
            return self.no_blocks
        self._drop(tables, request.num_computed)
        if missing * len(tables) > self.pool.num_free:
            return None
        new = tuple(tuple(self.pool.allocate(missing)) for _ in tables)
        for table, blocks in zip(tables, new, strict=True):
            table.blocks += blocks
        return new

    def room_beside(self, request: Request, reserve: int) -> int:
        """Return how many next tokens leave ``reserve`` free blocks to others.

        The block of the first of them counts as taken.
        """
        tables = self._tables[request.request_id]
        if not tables:
            return maxsize
        held = len(tables[0].blocks)
        needed = request.num_computed // self.block_size + 1
        free = (self.pool.num_free - reserve) // len(tables)
        return max(needed, held, held + free) * self.block_size - request.num_computed

    def _drop(self, tables: Sequence[_Table], num_computed: int) -> None:
        """Give back the blocks before a window."""
        for kind, table in zip(self.kinds, tables, strict=True):
            first = kind.first_kept(num_computed, self.block_size)
            if first > table.dropped:
                self.pool.free(table.blocks[table.dropped : first])
                table.dropped = first

    def computed(self, request: Request, start: int) -> None:
        """Note the keys of the blocks that became full with the tokens from ``start`` on."""
        # Other sequences find these blocks from now on.
        first, last = start // self.block_size, request.num_computed // self.block_size
        if first == last or not self.prefix_reuse:
            return
        hashes = self.hashes(request, last)
        tables = self._tables[request.request_id]
        for group, table in enumerate(tables):
            for index in range(first, last):
                self.pool.keep(table.blocks[index], (group, hashes[index]))
        if self.stored is not None:
            for index in range(first, last):
                blocks = [table.blocks[index] for table in tables]
                self.stored.note(hashes[index], blocks)
        at_end_of_block = not request.num_computed % self.block_size
        if self.states and start < len(request.prompt) and at_end_of_block:
            self.states.keep(request.request_id, hashes[-1])

    def chunk(self, request: Request, start: int, count: int) -> int:
        """Return the number of next tokens to compute before a state is copied, at most ``count``.

        At least one. A prompt is computed up to the end of its last full block first, short of the
        last token.
        """
        if not (self.states and self.prefix_reuse and start < len(request.prompt)):
            return count
        last = min(start + count, request.num_tokens - 1)
        end_of_block = last // self.block_size * self.block_size
        return end_of_block - start if end_of_block > start else count

    def discard(self, request: Request) -> None:
        """Forget the contents of a failed sequence: its blocks may hold NaN."""
        groups = range(len(self.kinds))
        self.pool.discard((group, digest) for group in groups for digest in request.block_hashes)
        if self.states:
            self.states.pool.discard(request.block_hashes)

    def close(self, request: Request) -> None:
        """Give the blocks of a sequence back. The contents stay until others need the blocks."""
        for table in self._tables.pop(request.request_id):
            self.pool.free(table.held())
        if self.states:
            self.states.close(request.request_id)

    def _digest(self, request: Request, count: int) -> bytes:
        """Return the hash of the first ``count`` tokens; at an end of a block, the block's hash."""
        full, rest = divmod(count, self.block_size)
        hashes = self.hashes(request, full)
        before = hashes[-1] if hashes else _root(request)
        if not rest:
            return before
        tokens = array("q", request.tokens(full * self.block_size, count))
        return sha256(b"part" + before + tokens.tobytes()).digest()

    def hashes(self, request: Request, count: int) -> list[bytes]:
        """Return the hashes of a request's first ``count`` blocks, all full."""
        hashes = request.block_hashes
        for index in range(len(hashes), count):
            before = hashes[-1] if hashes else _root(request)
            first = index * self.block_size
            tokens = array("q", request.tokens(first, first + self.block_size))
            hashes.append(sha256(b"block" + before + tokens.tobytes()).digest())
        return hashes[:count]


def _root(request: Request) -> bytes:
    """Return the 32 bytes before the first block, made of salt, adapter and rotations.

    Hashes of salts, adapters, rotations and blocks begin with different words. So nobody can make
    up a salt with the hash of a block.
    """
    salt = request.cache_salt
    if salt is None:
        root = bytes(sha256().digest_size)
    else:
        root = sha256(b"salt" + salt.encode("utf-8", "surrogatepass")).digest()
    if request.lora_digest:
        root = sha256(b"lora" + root + request.lora_digest.encode()).digest()
    if not any(request.rotation):
        return root
    rotation = array("q", request.rotation).tobytes()
    return sha256(b"rotation" + root + rotation).digest()
