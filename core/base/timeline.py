"""``Timeline``: the phases of the work for a request, or for the start of a server.

A timeline is current in a task and in the threads that work for the task. ``phase`` notes the
beginning of some work in the current timeline, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import wraps
from time import monotonic
from typing import Any, NamedTuple, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Phase(NamedTuple):
    """A piece of work, from its beginning to the beginning of the next one.

    Attributes:
        begin: seconds of ``time.monotonic``.
        name: of the work, such as "tokenize".
    """

    begin: float
    name: str


class Computation(NamedTuple):
    """The steps of an engine for one prompt.

    Attributes:
        begin: of the first step, in seconds of ``time.monotonic``.
        end: the moment of the last token.
        replica: the number of the engine.
    """

    begin: float
    end: float
    replica: int


class Timeline:
    """The phases of a request or of a start. Threads may add to one timeline.

    Args:
        name: of the first phase, which begins now.

    Attributes:
        phases: so far, in their order.
        computed: the steps of each prompt.
        attributes: further facts by name, for those who read the timeline.
        ended: True after ``end``.

    After ``end``, the timeline stays as it is, since another thread may read it.
    """

    def __init__(self, name: str) -> None:
        self.phases = [Phase(monotonic(), name)]
        self.computed: list[Computation] = []
        self.attributes: dict[str, Any] = {}
        self.ended = False

    @property
    def name(self) -> str:
        """The name of the phase that was added last."""
        return self.phases[-1].name

    def add(self, name: str) -> None:
        """Begin a phase."""
        # The engine's thread keeps the timeline of the start for good.
        if not self.ended:
            self.phases.append(Phase(monotonic(), name))

    def add_steps(self, found: Computation) -> None:
        """Note the steps of a prompt."""
        if not self.ended:
            self.computed.append(found)

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Note facts by name. A later value of a name replaces the former one."""
        if not self.ended:
            self.attributes.update(facts)

    def end(self) -> float:
        """Take no more notes, and return the present moment."""
        self.ended = True
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


class phase:  # noqa: N801  # read like a function, as contextlib's own are
    """Note a phase for the time of a ``with`` block, or of each call of a decorated function.

    After the block, the former phase goes on. After ``MOST_PHASES``, nothing is noted.

    Args:
        name: of the phase.
    """

    # A class, as each part of a stream enters a block, and a generator takes three times as long.
    __slots__ = ("_former", "_name", "_timeline")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        timeline = _CURRENT.get()
        # A full timeline stays in the phase that goes on behind the block.
        if timeline is not None and len(timeline.phases) >= MOST_PHASES:
            timeline = None
        self._timeline = timeline
        if timeline is not None:
            # Another thread may add phases meanwhile. A wrong name for a moment would do no harm.
            self._former = timeline.name
            timeline.add(self._name)

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Return a function with a block around each call."""

        @wraps(function)
        def within(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            # Calls of several threads have a block each.
            with phase(self._name):
                return function(*args, **kwargs)

        return within

    def __exit__(self, *_: object) -> None:
        if self._timeline is not None:
            self._timeline.add(self._former)
