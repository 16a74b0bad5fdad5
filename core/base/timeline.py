"""``Timeline``: the phases of the work for a request, or for the start of a server.

A timeline is current in a task and in the threads that work for the task. ``phase`` notes the
beginning of some work in the current timeline, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from time import monotonic
from typing import Any, NamedTuple


class Phase(NamedTuple):
    """A piece of work, from its beginning to the beginning of the next one.

    Attributes:
        begin: seconds of ``time.monotonic``.
        name: of the work, such as "tokenize".
    """

    begin: float
    name: str


class Timeline:
    """The phases of a request or of a start. Threads may add to one timeline.

    Args:
        name: of the first phase, which begins now.

    Attributes:
        phases: so far, in their order.
        computed: for each prompt, the moments of its first step and of its last token.
        attributes: further facts by name, for those who read the timeline.
    """

    def __init__(self, name: str) -> None:
        self.phases = [Phase(monotonic(), name)]
        self.computed: list[tuple[float, float]] = []
        self.attributes: dict[str, Any] = {}
        self._ended = False

    @property
    def name(self) -> str:
        """The name of the phase that was added last."""
        return self.phases[-1].name

    def add(self, name: str) -> None:
        """Begin a phase. After the end of the timeline, nothing happens."""
        # The engine's thread keeps the timeline of the start for good.
        if not self._ended:
            self.phases.append(Phase(monotonic(), name))

    def end(self) -> float:
        """Take no more phases, and return the present moment."""
        self._ended = True
        return monotonic()


QUEUE = "queue"
RESPOND = "respond"
"""The phases of a request in an engine, and after its end there."""

NETWORK = "network"
"""The phase in which a part of an answer is sent."""

MOST_PHASES = 1 << 13
"""Phases of a timeline. A stream has two for each part of the answer."""

# Threads of an event loop have a copy of the context of the task that they work for.
_CURRENT: ContextVar[Timeline | None] = ContextVar("opgraft_timeline", default=None)


def current_timeline() -> Timeline | None:
    """Return the timeline of the present task or thread, if there is one."""
    return _CURRENT.get()


@contextmanager
def recorded(timeline: Timeline | None) -> Iterator[None]:
    """Make a timeline the current one within the block; with None, no phases are noted."""
    token: Token[Timeline | None] = _CURRENT.set(timeline)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Note a phase for the time of a ``with`` block. After the block, the former phase goes on.

    After ``MOST_PHASES``, nothing is noted.
    """
    timeline = _CURRENT.get()
    # A full timeline stays in the phase that goes on behind the block.
    if timeline is None or len(timeline.phases) >= MOST_PHASES:
        yield
        return
    # Another thread may add phases meanwhile. A wrong name for a moment would do no harm.
    former = timeline.name
    timeline.add(name)
    try:
        yield
    finally:
        timeline.add(former)
