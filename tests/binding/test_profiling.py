"""Times of ops in calls of a thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.binding.profiling import profile, timed_ops
from opgraft.ops import RMSNorm
from torch import Tensor


@pytest.fixture
def layer() -> Any:
    """A layer of two norms."""

    @PluggableLayer.register("two_norms")
    class TwoNorms(PluggableLayer):
        def __init__(self) -> None:
            super().__init__()
            self.first = RMSNorm(8)
            self.second = RMSNorm(8)

        def forward(self, x: Tensor) -> Any:
            return self.second(self.first(x))

    return TwoNorms()


def ticks() -> Callable[[], float]:
    """A clock that is a second later at each look."""
    counted = itertools.count()
    return lambda: float(next(counted))


def test_the_time_of_an_op_is_its_own(layer: Any) -> None:
    """The time of a layer leaves out the ops that it calls, and all times together are the whole."""
    with timed_ops(ticks()) as seconds:
        layer(torch.ones(2, 8))
    by_op = {called.op: spent for called, spent in seconds.items()}
    # Six looks: five seconds, of which each norm takes one.
    assert by_op == {"two_norms": 3.0, "rms_norm": 2.0}
    norm = layer.first.decision
    [called] = [each for each in seconds if each.op == "rms_norm"]
    assert called.kernel == norm.chosen


def test_calls_of_other_threads_have_no_time(layer: Any) -> None:
    """A block times its own thread, and ends with the calls as they were."""
    before = CustomOp.__call__
    with timed_ops(ticks()) as seconds, profile():
        thread = threading.Thread(target=layer, args=(torch.ones(2, 8),))
        thread.start()
        thread.join()
    assert seconds == {}
    assert CustomOp.__call__ is before
