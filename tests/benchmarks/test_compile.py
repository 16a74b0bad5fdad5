"""The benchmark of compilation: what it makes of measured seconds, and a part of it on one layer."""

from __future__ import annotations

from argparse import Namespace
from types import ModuleType

import pytest
from benchmarks.test_engine import BENCHMARKS


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compile

    return compile


def test_sides_are_compared_round_by_round(compilation: ModuleType) -> None:
    """A ratio is the median over rounds, on the clock or of CPU time, and a limit holds or is missed."""
    ours = [{"seconds": seconds, "cpu_seconds": seconds / 4} for seconds in (0.3, 0.2, 9.0)]
    theirs = [{"seconds": seconds, "cpu_seconds": 1.0} for seconds in (1.0, 0.5, 1.0)]
    on_the_clock = compilation.over("x", ours, theirs, Namespace(cpu_time=False), 0.35)
    assert on_the_clock.measured == pytest.approx(0.4)
    assert on_the_clock.verdict == "missed"
    of_cpu_time = compilation.over("x", ours, theirs, Namespace(cpu_time=True), 0.35)
    assert of_cpu_time.measured == pytest.approx(0.075)
    assert of_cpu_time.verdict == "holds"


def test_fifty_sizes_are_one_graph(compilation: ModuleType) -> None:
    """The part that counts recompilations runs on a model of one layer, and its limits hold."""
    shape = compilation.Shape(layers=1)
    findings = list(compilation.PARTS["recompilations"](Namespace(shape=shape)))
    assert [(each.verdict, each.most) for each in findings] == [("holds", 0), ("holds", 1e-4)]
