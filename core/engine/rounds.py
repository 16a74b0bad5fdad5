"""``Rounds``: steps that replicas make together, as they share the experts of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable

from opgraft.config import ParallelConfig
from opgraft.errors import ConfigError, EngineError


class Rounds:
    """Counts rounds, in each of which every replica makes one step: of its requests, or of none.

    A replica that has work makes the next step when it likes, which opens a round where it is the first to. The others
    are woken, and make a step in it too, whether they have work or not. Nobody waits for a round to be agreed upon, as
    collectives of the model bring the steps together; without work no round is opened, and all sleep.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened = 0
        self._places: list[Place] = []

    def place(self, wake: Callable[[], None]) -> Place:
        """Return the place of one more replica.

        Args:
            wake: called when another replica has opened a round, from the thread of that.
        """
        place = Place(self, wake)
        self._places.append(place)
        return place

    def enter(self, place: Place) -> None:
        """Have a replica take part in its next round."""
        with self._lock:
            place.made += 1
            opens = place.made > self._opened
            self._opened = max(self._opened, place.made)
        for other in self._places if opens else ():
            if other is not place:
                other.wake()

    def is_behind(self, place: Place) -> bool:
        """Tell whether a round is open that a replica has not made its step in."""
        return place.made < self._opened


class Place:
    """The place of a replica in rounds.

    Attributes:
        made: rounds that it has taken part in.
        wake: tells it that a round was opened.
    """

    def __init__(self, rounds: Rounds, wake: Callable[[], None]) -> None:
        self._rounds = rounds
        self.made = 0
        self.wake = wake

    def enter(self) -> None:
        """Take part in the next round."""
        self._rounds.enter(self)

    @property
    def is_behind(self) -> bool:
        """Tell whether a round is open that this replica has not made its step in."""
        return self._rounds.is_behind(self)


def expect_rounds(parallel: ParallelConfig) -> None:
    """Refuse settings under which replicas cannot share experts, or which promise what those that do cannot keep.

    Raises:
        ConfigError: workers are no processes, replicas have several stages, workers are to start again, or requests to
            move.
    """
    shared = f"parallel.expert is {parallel.expert}, so that replicas share experts"
    if parallel.restart_workers:
        raise ConfigError(
            f"{shared}, and parallel.restart_workers {parallel.restart_workers}: the ranks of all are one job, in "
            "which none can be replaced, so that they are lost together. Set it to 0, and have a supervisor start a "
            f"new server where one ends with the exit code {EngineError.exit_code}"
        )
    if parallel.on_replica_loss == "move":
        raise ConfigError(
            f"{shared}, and parallel.on_replica_loss is move: they are lost together, and none is left that requests "
            "could move to: set it to fail"
        )
    if parallel.executor not in (None, "processes"):
        raise ConfigError(
            f"{shared}, and parallel.executor is {parallel.executor}, where each replica is a job of its own, and "
            "experts are shared within one: set it to processes, on this host, or parallel.data to 1 and "
            "parallel.expert to parallel.tensor, which may be ranks of several hosts"
        )
    if parallel.pipeline > 1:
        raise ConfigError(
            f"{shared}, and parallel.pipeline {parallel.pipeline}: they make their steps together only without stages. "
            "Set one of the two to 1"
        )
