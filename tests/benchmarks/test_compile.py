"""The benchmark of compilation: what it makes of measured seconds, and a part of it on one layer."""

from __future__ import annotations

from argparse import Namespace
from types import ModuleType

import pytest
from benchmarks.test_engine import BENCHMARKS

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")


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


def test_a_limit_below_what_the_machine_multiplies_is_beyond_it(compilation: ModuleType) -> None:
    """The bound of a call is its products at the measured speed, over what the other side takes."""
    work = compilation.work_of(compilation.Shape(layers=1, hidden=64, vocabulary=100))
    assert work.layers + work.head == 4 * 64 * 64 + 3 * 64 * 172 + 6400
    limits = [
        {"bytes_per": {"seconds": 1e12}, "products_per": {"seconds": work.layers + work.head}}
    ]
    least = compilation.least_of(work, 8, limits)
    assert least == {"seconds": pytest.approx(8)}
    for seconds, verdict in ((20.0, "missed"), (10.0, "beyond")):
        row = compilation.over(
            "x", [{"seconds": 9.0}], [{"seconds": seconds}], Namespace(cpu_time=False), 0.42, least
        )
        assert (row.bound, row.verdict) == (pytest.approx(8 / seconds), verdict)


def test_fifty_sizes_are_one_graph(compilation: ModuleType) -> None:
    """The part that counts recompilations runs on a model of one layer, and its limits hold."""
    shape = compilation.Shape(layers=1)
    findings = list(compilation.PARTS["recompilations"](Namespace(shape=shape)))
    assert [(each.verdict, each.most) for each in findings] == [("holds", 0), ("holds", 1e-4)]
