"""``Replica``: one of the engines that share the requests of a front end."""

from __future__ import annotations

from concurrent.futures import Future

from opgraft.errors import EngineError
from opgraft.serving.engine_thread import EngineThread, Reader
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.text_engine import TextEngine

_EXPECTED = 256
"""Tokens that an answer is taken to have, where it may have more: few are as long as they may be."""


class Replica:
    """One of the engines.

    Args:
        number: among the replicas.
        thread: of the engine.

    Attributes:
        requests: those that went to it and have not ended, by id.
    """

    def __init__(self, number: int, thread: EngineThread) -> None:
        self.number = number
        self.thread = thread
        self.requests: dict[str, OpenRequest] = {}

    @property
    def engine(self) -> TextEngine:
        """The engine of the replica."""
        return self.thread.engine

    def open(self, reader: Reader, prepared: OpenRequest) -> Future[bool]:
        """Have the engine begin with a request; the result tells whether it did, or its reader has left.

        Raises:
            EngineError: it has ended; the result may raise it too.
        """
        name = prepared.output.request_id

        def note(opening: Future[bool]) -> None:
            if opening.cancelled() or opening.exception() is not None or not opening.result():
                self.requests.pop(name, None)

        try:
            opening = self.thread.call(self.thread.open, reader, prepared)
        except EngineError:
            self.requests.pop(name, None)
            raise
        opening.add_done_callback(note)
        return opening

    def fault(self) -> EngineError | None:
        """Return why the engine cannot go on, if that is so."""
        try:
            self.thread.check()
            self.engine.core.check_health()
        except EngineError as error:
            return error
        return None

    @property
    def state(self) -> str:
        """``starting``, ``ready``, ``restarting`` or ``lost``."""
        if not self.thread.has_engine:
            return "starting"
        if self.fault() is not None:
            return "lost"
        executor = self.engine.core.executor
        return "restarting" if executor.is_lost or executor.is_restarting else "ready"

    def forget_ended(self) -> None:
        """Forget requests that have ended."""
        for name in [name for name, each in list(self.requests.items()) if each.output.finished]:
            self.requests.pop(name, None)

    def load(self) -> int:
        """Return the tokens that are outstanding."""
        return sum(each.outstanding(_EXPECTED) for each in list(self.requests.values()))
