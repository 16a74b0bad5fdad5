"""``StoredPrefixes``: moves full blocks between the cache and the stores of the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.engine.request import Request
from opgraft.engine.schedule.kv_cache import KVCacheManager
from opgraft.engine.stats import Counters


class _Missing(NamedTuple):
    """A position of a beginning that is stored, and that the cache lacks.

    Attributes:
        digest: hash of the tokens up to the end of the block.
        groups: the groups of layers without the block.
    """

    digest: bytes
    groups: Sequence[int]


class _Beginning(NamedTuple):
    """The full blocks of a request's beginning, by place.

    Attributes:
        hashes: of the blocks.
        found: for each group, the block of the cache at each place, or ``None``.
        length: blocks of the longest beginning in the cache.
        absent: hashes that a group needs a block for.
    """

    hashes: Sequence[bytes]
    found: Sequence[Sequence[int | None]]
    length: int
    absent: Sequence[bytes]


class StoredPrefixes:
    """The blocks that the workers of an engine keep outside of the cache, as of ``StoredBlocks``.

    A stored beginning becomes one of the cache: free blocks are filled with the contents, and get
    their keys. After that, sequences find them like those of an earlier sequence.

    Args:
        cache: the tables of blocks.
        call_all: calls a method of all workers, between two steps.
        counters: of the engine.
        saves: save full blocks. Otherwise, the engine only looks for those of another process.

    Attributes:
        counters: the same.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        call_all: Callable[..., Any],
        counters: Counters,
        saves: bool = True,
    ) -> None:
        self._cache = cache
        self._call_all = call_all
        self.counters = counters
        self._saves = saves
        self._full: dict[bytes, Sequence[int]] = {}
        self._used: dict[bytes, None] = {}
        self._has_warned = False

    def note(self, digest: bytes, blocks: Sequence[int]) -> None:
        """Note a full block of each group, to be saved before the next step."""
        if self._saves:
            self._full[digest] = blocks

    def use(self, digests: Iterable[bytes]) -> None:
        """Note that a request uses blocks, which are to stay in the store longer than others."""
        if self._saves:
            self._used.update(dict.fromkeys(digests))

    def clear(self) -> None:
        """Forget the noted blocks, as the cache has lost its contents."""
        self._full = {}
        self._used = {}

    def save(self) -> None:
        """Let the workers save the noted blocks."""
        if self._full or self._used:
            full = list(self._full.items())
            used = list(self._used)
            self.clear()
            self._asked("save_blocks", full, used)

    def finish(self, seconds: float) -> None:
        """Wait until the workers have written all saved blocks, at most for the given time."""
        self._asked("finish_saving", seconds)

    def _asked(self, method: str, *given: object) -> list[Any]:
        """Return the answers of all workers; none after an error."""
        try:
            return list(self._call_all(method, *given))
        # If workers are lost, the next step fails, and tells it.
        except Exception as error:
            if not self._has_warned:
                logger.warning("stored blocks cannot be used: %s", described(error))
            self._has_warned = True
            return []

    def restore(self, request: Request) -> None:
        """Fill free blocks with the next ones of a request's beginning, as far as they are stored.

        Each request is looked up once, before its first admission, and as soon as it may fit.
        """
        if request.was_sought:
            return
        beginning = self._beginning(request, request.num_tokens)
        if not self._may_fit(request, beginning):
            return
        request.was_sought = True
        behind = self._stored(beginning)
        if behind > beginning.length:
            self._fill(beginning.hashes[:behind], beginning.found, beginning.length)

    def _may_fit(self, request: Request, beginning: _Beginning) -> bool:
        """Return False if a request surely cannot be admitted yet.

        Running requests would take the filled blocks before the admission.
        """
        pool = self._cache.pool
        held = 0
        for blocks in beginning.found:
            held += sum(block is not None and pool.references(block) > 0 for block in blocks)
        return self._cache.most_blocks(request.num_tokens, 1) - held <= pool.num_free

    def missing(self, request: Request) -> int:
        """Return about how many tokens of a prompt are neither in the cache nor stored.

        The last token counts in any case.
        """
        length = len(request.prompt)
        return length - self._stored(self._beginning(request, length)) * self._cache.block_size

    def _beginning(self, request: Request, num_tokens: int) -> _Beginning:
        """Look the first ``num_tokens`` tokens up in the cache, all but the last one."""
        cache = self._cache
        count = (num_tokens - 1) // cache.block_size
        hashes = cache.hashes(request, count)
        found = cache.found(hashes)
        length = cache.covered(found, count)
        absent = []
        for place in range(length, count):
            if any(blocks[place] is None for blocks in found):
                absent.append(hashes[place])
        return _Beginning(hashes, found, length, absent)

    def _stored(self, beginning: _Beginning) -> int:
        """Return the longest beginning in blocks that is in the cache or stored."""
        if not beginning.absent:
            return len(beginning.hashes)
        stored = min(self._asked("stored_blocks", beginning.absent), default=0)
        if not stored:
            return beginning.length
        if stored == len(beginning.absent):
            return len(beginning.hashes)
        return beginning.hashes.index(beginning.absent[stored])

    def _fill(
        self, hashes: Sequence[bytes], found: Sequence[Sequence[int | None]], length: int
    ) -> None:
        """Fill free blocks from the place ``length`` on, as many as there are."""
        cache = self._cache
        first_kept = cache.first_kept(len(hashes) * cache.block_size)
        held: list[int] = []
        for blocks, first in zip(found, first_kept, strict=True):
            held += [block for block in blocks[first : len(hashes)] if block is not None]
        # Free blocks of this beginning are not to be overwritten by the rest of it.
        cache.pool.share(held)
        try:
            missing = []
            room = cache.pool.num_free
            for place in range(length, len(hashes)):
                groups = [
                    group
                    for group, blocks in enumerate(found)
                    if blocks[place] is None and place >= first_kept[group]
                ]
                room -= len(groups)
                if room < 0:
                    break
                if groups:
                    missing.append(_Missing(hashes[place], groups))
            self._load(missing)
        finally:
            cache.pool.free(held)

    def _load(self, missing: Sequence[_Missing]) -> None:
        """Let the workers fill free blocks, and note the keys of those that all could fill."""
        pool = self._cache.pool
        wanted = []
        taken: list[list[int]] = []
        for each in missing:
            blocks: list[int | None] = [None] * len(self._cache.kinds)
            taken.append(pool.allocate(len(each.groups)))
            for group, block in zip(each.groups, taken[-1], strict=True):
                blocks[group] = block
            wanted.append((each.digest, blocks))
        try:
            filled = min(self._asked("load_blocks", wanted), default=0) if wanted else 0
            for each, blocks_of_place in list(zip(missing, taken, strict=True))[:filled]:
                for group, block in zip(each.groups, blocks_of_place, strict=True):
                    pool.keep(block, (group, each.digest))
            self.counters.restored_tokens += filled * self._cache.block_size
        finally:
            pool.free([block for blocks_of_place in taken for block in blocks_of_place])
