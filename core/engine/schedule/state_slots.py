"""Slots for the states of sequences, of layers without a key and value for each token."""

from __future__ import annotations

from collections.abc import Hashable

from opgraft.engine.schedule.blocks import BlockPool
from opgraft.engine.step import StateMove


class StateSlots:
    """Slots by number: one for each running sequence, and copies of earlier states.

    A state cannot be cut off at the token after which another sequence differs. So a state is
    copied at ends of blocks, under the key of the block: other sequences go on from there. A
    preempted sequence keeps its own state for its return. Sequences take the slots of copies, the
    longest unused copy first.

    Nothing here touches a tensor. ``moves`` lists the copies for the next step in order, so a slot
    may be given away before its content has been copied.

    Args:
        count: number of slots.

    Attributes:
        moves: for the next step.
    """

    def __init__(self, count: int) -> None:
        self.pool = BlockPool(count)
        self.moves: list[StateMove] = []
        self._slots: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        """Return the number of further sequences that may run."""
        return self.pool.num_free

    def slot(self, request_id: str) -> int:
        """Return the slot of a sequence."""
        return self._slots[request_id]

    def find(self, key: Hashable) -> int | None:
        """Return the slot with the state of a key."""
        return self.pool.lookup([key])[0]

    def open(self, request_id: str, kept: int | None) -> None:
        """Give a sequence a slot with a copy of the slot ``kept``, or with zeros for ``None``.

        Raises:
            RequestError: no slot is free.
        """
        if kept is not None:
            # Used and freed anew, the slot is the last one that the pool gives away.
            self.pool.share([kept])
            self.pool.free([kept])
        [slot] = self.pool.allocate(1)
        self._slots[request_id] = slot
        if slot != kept:
            self.moves.append((kept, slot))

    def keep(self, request_id: str, key: Hashable) -> None:
        """Copy the present state of a sequence, unless the key is known or no slot is free."""
        if self.pool.holds(key) or not self.pool.num_free:
            return
        [copy] = self.pool.allocate(1)
        self.moves.append((self._slots[request_id], copy))
        self.pool.keep(copy, key)
        self.pool.free([copy])

    def keep_for_return(self, request_id: str, key: Hashable) -> None:
        """Note the key of the present state of a sequence. The caller closes the slot next."""
        self.pool.keep(self._slots[request_id], key)

    def close(self, request_id: str) -> None:
        """Give the slot of a sequence back."""
        self.pool.free([self._slots.pop(request_id)])

    def forget(self) -> None:
        """Forget all copies and moves. A failed step may not have made its copies."""
        self.pool.forget()
        self.moves = []

    def take_moves(self) -> tuple[StateMove, ...]:
        """Return the moves for the next step, and forget them."""
        moves = tuple(self.moves)
        self.moves = []
        return moves
