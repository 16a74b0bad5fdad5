"""Admission: a bound on what waits, so that whoever is admitted is answered in time and the rest know at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opgraft.config import ServerConfig
from opgraft.errors import HTTPError

ADMITTED_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
"""Asked of the model, for which others may wait already."""


@dataclass
class Slot:
    """Room that a request takes among those that wait, from its admission until its first token has come."""

    sequences: int = 0
    tokens: int = 0


class Bodies:
    """Count of the bytes of bodies that are held at once; for one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0

    @contextmanager
    def held(self) -> Iterator[Callable[[int], None]]:
        """Count a body until the end of the block: call what is yielded with the bytes that have come of it.

        That raises ``HTTPError`` where others hold so many that they have no room.
        """
        size = 0

        def hold(more: int) -> None:
            nonlocal size
            if self._bytes > size and self._bytes + more > self._limit:
                raise _overloaded(
                    f"the bodies of all requests may have {self._limit} bytes together"
                )
            size += more
            self._bytes += more

        try:
            yield hold
        finally:
            self._bytes -= size


class Admission:
    """Count of the sequences and prompt tokens that wait for a first token; for one event loop."""

    def __init__(self, settings: ServerConfig) -> None:
        self._settings = settings
        self.sequences = 0
        self.tokens = 0

    def take(self, slot: Slot, sequences: int, tokens: int) -> None:
        """Put sequences and tokens in the place of those that a request has held so far.

        Raises:
            HTTPError: there is no room for as many.
        """
        self._expect(
            "sequences",
            self.sequences - slot.sequences,
            sequences,
            self._settings.max_waiting_requests,
        )
        self._expect("tokens", self.tokens - slot.tokens, tokens, self._settings.max_waiting_tokens)
        self._hold(slot, sequences, tokens)

    def begun(self, slot: Slot, sequences: int = 0, tokens: int = 0) -> None:
        """Give the room back, but for what still waits."""
        self._hold(slot, sequences, tokens)

    def _hold(self, slot: Slot, sequences: int, tokens: int) -> None:
        self.sequences += sequences - slot.sequences
        self.tokens += tokens - slot.tokens
        slot.sequences, slot.tokens = sequences, tokens

    def _expect(self, what: str, waiting: int, more: int, limit: int) -> None:
        if waiting and waiting + more > limit:
            raise _overloaded(
                f"{waiting} {what} wait already, this request has {more}, and at most {limit} may"
            )


def _overloaded(reason: str) -> HTTPError:
    return HTTPError(
        429, f"{reason}: try again later", code="overloaded", headers={"retry-after": "1"}
    )
