"""``RequestRouter``: which of the replicas of an engine a request goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from opgraft.binding.pluggable_class import PluggableClass

BLOCK = 16
"""Tokens by which beginnings of prompts are compared."""

WORTH = 4
"""Outstanding tokens that are worth waiting for, rather than to compute one of a prompt anew.

A token that is outstanding shares its step with a newcomer's; one that is computed anew is work for nothing.
"""


def choose_replica(loads: Mapping[int, int], held: Mapping[int, int]) -> int:
    """Return the replica with the least load, after a deduction for the cached part of the prompt.

    A session's next turn goes to the replica that holds the chat, unless the queue there costs more than computing
    the chat anew. Among equal replicas the first is taken.

    Args:
        loads: outstanding tokens of each replica that can take a request.
        held: tokens of the prompt's beginning in the cache of each replica; 0 if not named.
    """
    return min(
        loads,
        key=lambda replica: (
            loads[replica] - WORTH * held.get(replica, 0),
            loads[replica],
            replica,
        ),
    )


@PluggableClass.register("request_router")
class RequestRouter(PluggableClass):
    """Routes a request to the least loaded replica, or to one that holds the beginning of its prompt.

    It remembers the prompts that went to each replica by hashes of their blocks, as many as that replica's cache has
    room for. It is asked by one thread at a time.

    Args:
        capacities: tokens that the cache of each replica holds; 0 where it reuses none.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self._most = [capacity // BLOCK for capacity in capacities]
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]

    def route(self, tokens: Sequence[int], cache_salt: str | None, loads: Mapping[int, int]) -> int:
        """Return the replica that a request goes to, and remember its prompt there.

        Args:
            tokens: of the prompt, and of the output so far where the request has moved.
            cache_salt: requests of different salts share nothing in the cache.
            loads: tokens that are outstanding at each replica that can take a request; at least one.
        """
        hashes = _hashes(tokens, cache_salt) if any(self._most) else []
        chosen = choose_replica(loads, {replica: self._held(replica, hashes) for replica in loads})
        self._remember(chosen, hashes)
        return chosen

    def forget(self, replica: int) -> None:
        """Forget what went to a replica, whose cache was lost."""
        self._known[replica].clear()

    def _held(self, replica: int, hashes: Sequence[int]) -> int:
        known = self._known[replica]
        return BLOCK * next(
            (index for index, each in enumerate(hashes) if each not in known), len(hashes)
        )

    def _remember(self, replica: int, hashes: Sequence[int]) -> None:
        known = self._known[replica]
        for each in reversed(
            hashes
        ):  # so that the end of a prompt is forgotten before its beginning
            known[each] = None
            known.move_to_end(each)
        while len(known) > self._most[replica]:
            known.popitem(last=False)


def _hashes(tokens: Sequence[int], cache_salt: str | None) -> list[int]:
    """Return a hash of each beginning of full blocks."""
    hashes: list[int] = []
    before = hash(cache_salt)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, *tokens[start : start + BLOCK]))
        hashes.append(before)
    return hashes
