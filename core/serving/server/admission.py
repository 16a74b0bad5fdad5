"""Bounds on waiting requests: an admitted request is answered in time, and others fail at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opgraft.config import ServerConfig
from opgraft.errors import HTTPError


@dataclass
class Slot:
    """The share of a request in the waiting work, from admission to the first token."""

    sequences: int = 0
    tokens: int = 0


class Bodies:
    """The bytes of all bodies in memory. One event loop uses the object."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0

    @contextmanager
    def held(self) -> Iterator[Callable[[int], None]]:
        """Count a body until the end of the block.

        Yields a function for the number of new bytes of the body. The function raises ``HTTPError``
        if the bodies of other requests leave no room.
        """
        size = 0

        def hold(more: int) -> None:
            nonlocal size
            # A body alone has room, whatever its size: ``max_body_bytes`` bounds it.
            if self._bytes > size and self._bytes + more > self._limit:
                reason = f"the bodies of all requests may have {self._limit} bytes together"
                raise _overloaded(reason)
            size += more
            self._bytes += more

        try:
            yield hold
        finally:
            self._bytes -= size


class Admission:
    """The sequences and prompt tokens without a first token. One event loop uses the object."""

    def __init__(self, settings: ServerConfig) -> None:
        self._settings = settings
        self.sequences = 0
        self.tokens = 0

    def take(self, slot: Slot, sequences: int, tokens: int) -> None:
        """Replace the share of a request by these sequences and tokens.

        Raises:
            HTTPError: there is no room for so many.
        """
        settings = self._settings
        others = self.sequences - slot.sequences
        self._expect("sequences", others, sequences, settings.max_waiting_requests)
        others = self.tokens - slot.tokens
        self._expect("tokens", others, tokens, settings.max_waiting_tokens)
        self._hold(slot, sequences, tokens)

    def begun(self, slot: Slot, sequences: int = 0, tokens: int = 0) -> None:
        """Keep a share for the sequences and tokens that still wait, and give the rest back."""
        self._hold(slot, sequences, tokens)

    def _hold(self, slot: Slot, sequences: int, tokens: int) -> None:
        self.sequences += sequences - slot.sequences
        self.tokens += tokens - slot.tokens
        slot.sequences = sequences
        slot.tokens = tokens

    def _expect(self, what: str, waiting: int, more: int, limit: int) -> None:
        # A large request alone is served.
        if waiting and waiting + more > limit:
            held = f"{waiting} {what} wait already"
            raise _overloaded(f"{held}, this request has {more}, and at most {limit} may")


def _overloaded(reason: str) -> HTTPError:
    message = f"{reason}: try again later"
    return HTTPError(429, message, code="overloaded", headers={"retry-after": "1"})
