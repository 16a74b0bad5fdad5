"""Reports of steps to a watcher, such as an exporter of metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.engine.core import exceptions_that_fail_a_step
from opgraft.engine.stats import EngineStats
from opgraft.serving.outputs import RequestOutput

OnStep: TypeAlias = Callable[[EngineStats, Sequence[RequestOutput]], None]
"""Called after each step and each abort, with the changes since the last call.

The second argument has the outputs of requests with news. An encoder makes a call after each batch,
without requests.
"""


class StepReports:
    """Reports to a watcher, each with the changes since the last one.

    Args:
        stats: returns the present state and totals.
        on_step: the watcher, or None. A watcher that raises an error is logged and not called
            again.
    """

    def __init__(self, stats: Callable[[], EngineStats], on_step: OnStep | None) -> None:
        self._stats = stats
        self._on_step = on_step
        self._reported = stats()

    def send(self, outputs: Sequence[RequestOutput] = ()) -> None:
        """Report the changes up to now, and the outputs with news."""
        if self._on_step is None:
            return
        before = self._reported
        stats = self._stats()
        self._reported = stats
        try:
            self._on_step(stats.since(before), outputs)
        # A fault of a watcher must not end requests.
        except exceptions_that_fail_a_step() as error:
            logger.error("on_step failed and is not called again: %s", described(error))
            self._on_step = None
