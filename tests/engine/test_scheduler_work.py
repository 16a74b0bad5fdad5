"""The work of a step grows with what it computes, not with what waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opgraft.engine.schedule.kv_cache import LayerKind
from support.scheduling import counts, distinct, request, step
from support.simulated_runner import make_scheduler


class Calls:
    """Counts the calls of a method."""

    def __init__(self, owner: Any, name: str, size: Callable[..., int] = lambda *_: 1) -> None:
        self.original, self.size, self.number = getattr(owner, name), size, 0
        setattr(owner, name, self)

    def __call__(self, *arguments: Any) -> Any:
        self.number += self.size(*arguments)
        return self.original(*arguments)


def test_siblings_that_wait_are_looked_at_once() -> None:
    """The work of a step does not grow with the square of those that wait for a prompt that they share."""
    scheduler = make_scheduler(num_blocks=9999, max_num_seqs=999, budget=9999)
    for number in range(40):
        for sample in distinct(str(number), 5, 10 * number, n=8).split():
            scheduler.add(sample)
    looks = Calls(scheduler, "_awaits_parent")
    assert len(counts(step(scheduler))) == 40
    assert looks.number <= 40 * 8 + 40
    assert scheduler.num_waiting == 40 * 7
    assert len(counts(step(scheduler))) == 40 * 8


def test_siblings_are_put_aside_and_come_back() -> None:
    """Those that share a prompt wait aside while it is computed; an abort finds them, and an undone step ends that."""
    scheduler = make_scheduler()
    for sample in distinct("r", 10, 10, n=4).split():
        scheduler.add(sample)
    assert counts(scheduler.schedule()) == {"r/0": 10}
    assert (scheduler.waiting, scheduler.num_waiting) == ([], 3)
    scheduler.abort("r/2")
    assert scheduler.num_waiting == 2
    scheduler.undo()
    assert [each.request_id for each in scheduler.waiting] == ["r/0", "r/1", "r/3"]
    assert counts(step(scheduler)) == {"r/0": 10}
    assert counts(step(scheduler)) == {"r/0": 1, "r/1": 1, "r/3": 1}


def test_what_does_not_fit_is_not_looked_up_in_each_step() -> None:
    """A long prompt that waits costs a step nothing, until so much is free that it may fit."""
    scheduler = make_scheduler(num_blocks=40, max_model_len=150)
    scheduler.add(distinct("busy", 30, 1000, max_tokens=20))
    step(scheduler)
    scheduler.add(distinct("long", 130, 10, max_tokens=5))
    step(scheduler)
    looked_up = Calls(scheduler.cache, "longest_prefix")
    for _ in range(18):
        assert list(counts(step(scheduler))) == ["busy"]
    assert looked_up.number == 0
    assert scheduler.running == []
    assert counts(step(scheduler)) == {"long": 32}
    assert looked_up.number == 1


@pytest.mark.parametrize("kinds", [[LayerKind()], [LayerKind(), LayerKind(6)]])
def test_what_does_not_fit_is_admitted_when_another_has_computed_its_beginning(
    kinds: list[LayerKind],
) -> None:
    """Blocks that come to be shared while a request waits need no room any more."""
    scheduler = make_scheduler(kinds, num_blocks=16 * len(kinds), budget=64)
    scheduler.add(request("first", 32, max_tokens=9))
    scheduler.add(request("second", 34, max_tokens=9))
    assert counts(step(scheduler)) == {"first": 32}
    assert counts(step(scheduler)) == {"first": 1, "second": 2}
