"""The pool of blocks: reference counts, contents by key, and reuse of the block that was unused for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from opgraft.errors import RequestError


class BlockPool:
    """Blocks by number, each in use by some sequences or free. Every operation takes O(1) per block.

    A free block keeps its content, under the key that it was kept by, until it is allocated again.
    Those without content go first, then the one that was freed first.

    Attributes:
        revived: how often a free block came into use again for its content.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.revived = 0
        self._references = [0] * num_blocks
        self._keys: list[Hashable | None] = [None] * num_blocks
        self._by_key: dict[Hashable, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Return the number of blocks that nobody uses, whether they have content or not."""
        return len(self._free)

    def references(self, block: int) -> int:
        """Return how many tables a block stands in."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, whose contents are forgotten.

        Raises:
            RequestError: fewer are free.
        """
        if count > len(self._free):
            raise RequestError(
                f"{count} blocks of the cache are allocated and {len(self._free)} of {self.num_blocks} are free: "
                "compare with num_free before"
            )
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self._by_key.pop(self._keys[block], None)
            self._keys[block] = None
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each of some blocks, which may be free with content."""
        for block in blocks:
            self.revived += not self._references[block]
            self._references[block] += 1
            self._free.pop(block, None)

    def adopt(self, block: int) -> int:
        """Take a free block with its content, which nobody else finds from now on, and return it."""
        self.share([block])
        self._by_key.pop(self._keys[block], None)
        self._keys[block] = None
        return block

    def free(self, blocks: Sequence[int]) -> None:
        """Give a reference to each of a sequence's blocks back; the last are to be reused before the first.

        Raises:
            RequestError: a block is free already.
        """
        for block in reversed(blocks):
            if not self._references[block]:
                raise RequestError(
                    f"block {block} of the cache is freed twice: free what was allocated or shared, once"
                )
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=self._keys[block] is not None)

    def keep(self, block: int, key: Hashable) -> None:
        """Note the key of a block's content, unless another block holds the same."""
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
        """Tell whether some block has the content of a key."""
        return key in self._by_key

    def lookup(self, keys: Iterable[Hashable]) -> list[int | None]:
        """Return the block that holds the content of each key, ``None`` where none does."""
        return [self._by_key.get(key) for key in keys]
