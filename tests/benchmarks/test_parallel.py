"""The benchmark of ranks: what it makes of what each rank measured."""

from __future__ import annotations

from argparse import Namespace
from types import ModuleType

import pytest
from benchmarks.test_engine import BENCHMARKS


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import parallel

    return parallel


def test_a_round_takes_as_long_as_its_slower_rank(parallel: ModuleType) -> None:
    """Gains are those of rounds; collectives are told of the rank that was in them for the shortest time."""
    alone = [[parallel.Decoded(0.030, 0.030, 0, 0, 0.0, 0.0)]]
    ranks = [
        parallel.Decoded(0.024, 0.020, 62, 9e5, 0.004, 0.003),
        parallel.Decoded(0.025, 0.015, 62, 9e5, 0.010, 0.009),
    ]
    gain, own, collectives = parallel._gain("x", alone, [ranks], 1.5, 1.4)
    assert gain.measured == pytest.approx(30 / 25)
    assert gain.verdict == "beyond"
    assert own.measured == pytest.approx(30 / 20)
    assert collectives.measured == pytest.approx(4000)
    assert collectives.detail.endswith("waits least, 3000 us")


def test_the_larger_part_or_the_memory_bounds_the_gain(parallel: ModuleType) -> None:
    """A step of 10 ms of 100 bytes: a rank with 60 of them takes 6 ms, and both read all in 5 or in 8 ms."""
    assert parallel.possible_gain(100, 60, 100 / 0.005, 0.010) == pytest.approx(10 / 6)
    assert parallel.possible_gain(100, 60, 100 / 0.008, 0.010) == pytest.approx(10 / 8)


def test_a_step_has_come_when_the_last_worker_has_it(
    parallel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of step is held to that time, whatever the sender's; a byte to each is what is possible."""
    import parallel_broadcast

    taken = {parallel_broadcast.Wakes: (40.0, 90.0)}
    monkeypatch.setattr(
        parallel_broadcast, "_measured", lambda way, steps: [taken.get(type(way), (100.0, 200.0))]
    )
    for way in (parallel_broadcast.Pipes, parallel_broadcast.Sockets, parallel_broadcast.Wakes):
        monkeypatch.setattr(way, "__init__", lambda self: None)  # nothing is sent
    findings = list(parallel.PARTS["broadcast"](Namespace(rounds=1)))
    pipes = [each for each in findings if each.name.endswith("Pipes")]
    assert [(each.measured, each.bound, each.verdict) for each in pipes] == [
        (200.0, 90.0, "missed")
    ] * 3
