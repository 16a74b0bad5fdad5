"""The slots for states of sequences, which layers keep that have no key and value for each token."""

from __future__ import annotations

from collections.abc import Hashable

from opgraft.engine.schedule.blocks import BlockPool
from opgraft.engine.step import StateMove


class StateSlots:
    """Slots by number: one for each sequence that runs, and copies of what some of them had once.

    A state cannot be cut off where another sequence goes its own way. So it is copied where one
    may: at the ends of blocks, under the keys of these. A sequence that is preempted leaves its own
    behind. Copies make room for sequences, the one first that was not used for longest.

    Nothing here touches a tensor. What is to happen to them is noted in ``moves``, in order, for
    the next step: so a slot may be given away before what it held has been copied.

    Args:
        count: of all slots.

    Attributes:
        moves: for the next step.
    """

    def __init__(self, count: int) -> None:
        self.pool = BlockPool(count)
        self.moves: list[StateMove] = []
        self._slots: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        """Return the number of sequences that may run besides."""
        return self.pool.num_free

    def slot(self, request_id: str) -> int:
        """Return the slot of a sequence."""
        return self._slots[request_id]

    def find(self, key: Hashable) -> int | None:
        """Return the slot that has the state of a key."""
        return self.pool.lookup([key])[0]

    def open(self, request_id: str, kept: int | None) -> None:
        """Give a sequence a slot with a copy of the state that another slot has, or with zeros.

        Raises:
            RequestError: none is free.
        """
        if kept is not None:  # the last to be taken
            self.pool.share([kept])
            self.pool.free([kept])
        [slot] = self.pool.allocate(1)
        self._slots[request_id] = slot
        if slot != kept:
            self.moves.append((kept, slot))

    def keep(self, request_id: str, key: Hashable) -> None:
        """Copy the state that a sequence has now, unless it is known or there is no room."""
        if self.pool.holds(key) or not self.pool.num_free:
            return
        [copy] = self.pool.allocate(1)
        self.moves.append((self._slots[request_id], copy))
        self.pool.keep(copy, key)
        self.pool.free([copy])

    def leave(self, request_id: str, key: Hashable) -> None:
        """Have the state that a sequence has now found in its own slot, which is to be closed."""
        self.pool.keep(self._slots[request_id], key)

    def close(self, request_id: str) -> None:
        """Give the slot of a sequence back."""
        self.pool.free([self._slots.pop(request_id)])

    def forget(self) -> None:
        """Forget all copies and moves: a step that was to make some was not computed to its end."""
        self.pool.forget()
        self.moves = []

    def take_moves(self) -> tuple[StateMove, ...]:
        """Return the moves, which the next step makes."""
        moves, self.moves = tuple(self.moves), []
        return moves
