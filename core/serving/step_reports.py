"""Reports of steps to who watches them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from opgraft.base.text import described
from opgraft.engine.core import step_failures
from opgraft.engine.stats import EngineStats
from opgraft.logger import logger
from opgraft.serving.outputs import RequestOutput

OnStep: TypeAlias = Callable[[EngineStats, Sequence[RequestOutput]], None]
"""Called after each step, and after an abort, with what has changed since the last call, and the requests with news.

An encoder calls it after each batch, without requests.
"""


class StepReports:
    """Reports to a watcher, each with what has changed since the last.

    Args:
        stats: gives the state and the totals of now.
        on_step: the watcher, if there is one. If it raises, that is logged, and it is not called
            again.
    """

    def __init__(self, stats: Callable[[], EngineStats], on_step: OnStep | None) -> None:
        self._stats = stats
        self._on_step = on_step
        self._reported = stats()

    def send(self, outputs: Sequence[RequestOutput] = ()) -> None:
        """Report the changes up to now, and the requests that have news."""
        if self._on_step is None:
            return
        stats, before = self._stats(), self._reported
        self._reported = stats
        try:
            self._on_step(stats.since(before), outputs)
        except step_failures() as error:  # requests do not end because somebody watches them
            logger.error("on_step failed and is not called again: %s", described(error))
            self._on_step = None
