"""The pool of blocks: reference counts, contents by key, and reuse of the longest unused block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from opgraft.errors import RequestError


class BlockPool:
    """Blocks by number. A block is free, or in use by some sequences.

    Every operation takes O(1) per block. A free block keeps its content and the content's key
    until somebody allocates the block. Blocks without content are allocated first, then the block
    that was freed first.

    Attributes:
        revived: number of times that a free block came into use again for its content.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.revived = 0
        self._references = [0] * num_blocks
        self._keys: list[Hashable | None] = [None] * num_blocks
        self._by_key: dict[Hashable, int] = {}
        # A machine with much memory has a million blocks for a small model, and uses a few.
        self._untouched = range(num_blocks)
        self._free: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Return the number of blocks that no sequence uses, with content or without."""
        return len(self._free) + len(self._untouched)

    def references(self, block: int) -> int:
        """Return the number of tables with this block."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, and forget their contents.

        Raises:
            RequestError: fewer blocks are free.
        """
        if count > self.num_free:
            raise RequestError(
                f"{count} blocks of the cache are allocated and {self.num_free} of "
                f"{self.num_blocks} are free: compare with num_free before"
            )
        blocks = [self._next_free() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self._by_key.pop(self._keys[block], None)
            self._keys[block] = None
        return blocks

    def _next_free(self) -> int:
        """Take the next free block: without content, then untouched, then the one freed first."""
        first = next(iter(self._free), None)
        has_no_content = first is not None and self._keys[first] is None
        if has_no_content or not self._untouched:
            return self._free.popitem(last=False)[0]
        block = self._untouched[0]
        self._untouched = self._untouched[1:]
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each block. A free block comes back with its content."""
        for block in blocks:
            self.revived += not self._references[block]
            self._references[block] += 1
            self._free.pop(block, None)

    def adopt(self, block: int) -> int:
        """Take a free block with its content, and return the block. Nobody else finds it again."""
        self.share([block])
        self._by_key.pop(self._keys[block], None)
        self._keys[block] = None
        return block

    def free(self, blocks: Sequence[int]) -> None:
        """Give back a reference to each block of a sequence.

        The last blocks are reused before the first, because more sequences share a beginning.

        Raises:
            RequestError: a block is free already.
        """
        for block in reversed(blocks):
            if not self._references[block]:
                raise RequestError(
                    f"block {block} of the cache is freed twice: free what was allocated or "
                    "shared, once"
                )
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                # Blocks without content go to the front: their reuse costs nothing.
                self._free.move_to_end(block, last=self._keys[block] is not None)

    def keep(self, block: int, key: Hashable) -> None:
        """Note the key of a block's content, unless another block has the same content."""
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key

    def discard(self, keys: Iterable[Hashable]) -> None:
        """Forget the contents of some keys."""
        for key in keys:
            block = self._by_key.pop(key, None)
            if block is not None:
                self._keys[block] = None

    def forget(self) -> None:
        """Forget all contents."""
        self._keys = [None] * self.num_blocks
        self._by_key.clear()

    def holds(self, key: Hashable) -> bool:
        """Return True if some block has the content of a key."""
        return key in self._by_key

    def lookup(self, keys: Iterable[Hashable]) -> list[int | None]:
        """Return the block with the content of each key, or ``None``."""
        return [self._by_key.get(key) for key in keys]
