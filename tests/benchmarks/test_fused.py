"""The benchmark of joined kernels: what it makes of what each rank measured."""

from __future__ import annotations

from types import ModuleType

import pytest
from benchmarks.test_engine import BENCHMARKS


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fused

    return fused


def test_a_median_is_that_of_the_calls_of_both_ranks(fused: ModuleType) -> None:
    """One rank waits for the other one, and this waiting counts in the whole time."""
    parts = {"in two parts": [3.0] * 3}
    quick = fused.Times([2.0] * 3, [3.0] * 3, [2.5] * 3, parts)
    waiting = fused.Times([2.0] * 3, [5.0] * 3, [2.5] * 3, parts)
    product, work, divided = fused.product_shares([quick, waiting], "x", 1)
    assert (product.measured, work.measured, divided.measured) == (2 / 4, 2.5 / 4, 3 / 2)
    assert divided.name == "x, product in two parts / at once"
