"""``OpTimes``: the times of ops in some of the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import torch
from opgraft.binding.profiling import CalledOp, timed_ops
from opgraft.platform import HOST
from opgraft.plugins.selection import current_platform

REST = ("outside of ops", "", "")
"""The rest of the model, such as operators of torch between ops."""

# A plain dictionary, since results travel between processes.
_NONE: Mapping[tuple[str, str, str], float] = {}


class OpTimes:
    """Times the ops of each N-th step, of which the other steps are said to be alike.

    Args:
        every: N; 0 for no step.
        device: of the model. On a device other than the host, a timed op waits for the device.
    """

    def __init__(self, every: int, device: torch.device) -> None:
        self._every = every
        self._now = clock_of(device)
        self._steps = 0

    @contextmanager
    def of_step(self, *, is_eager: bool) -> Iterator[Mapping[CalledOp, float]]:
        """Yield the seconds by op within the block; none, unless it is the turn of this step.

        Args:
            is_eager: the model calls its ops from Python. Compiled code would only be disturbed.
        """
        self._steps += 1
        if not (self._every and is_eager) or self._steps % self._every:
            yield {}
            return
        with timed_ops(self._now) as seconds:
            yield seconds


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds that waits for the device before each reading.

    A kernel on a device runs after its call has returned. The host needs no waiting.
    """
    if device.type == HOST:
        return perf_counter

    def now() -> float:
        current_platform().synchronize(device.index or 0)
        return perf_counter()

    return now


def with_rest(
    seconds: Mapping[CalledOp, float], whole: float
) -> Mapping[tuple[str, str, str], float]:
    """Return the times of ops with the rest of the whole time; none without times.

    Args:
        seconds: by op.
        whole: seconds of the model in the step.
    """
    if not seconds:
        return _NONE
    told = {(op, kernel, provider): spent for (op, kernel, provider), spent in seconds.items()}
    told[REST] = max(whole - sum(seconds.values()), 0.0)
    return told
