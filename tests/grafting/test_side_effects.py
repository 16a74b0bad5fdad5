"""Forwards that do more than return a result: they are found by reading their code, and left alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import graft
from support import graft_counting
from torch import nn

CALLS: list[int] = []
COUNTS = {"calls": 0}
TOTAL = 0


class Norm(nn.Module):
    """An RMS norm without side effects."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        self.calls: list[Any] = []
        self.recent: deque[Any] = deque(maxlen=3)
        self.by_name: dict[str, list[Any]] = {"all": []}

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x)


class SetsAttribute(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return self._norm(x)


class SetsInHelper(Norm):
    def _remember(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(self._remember(x))


class Appends(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(x.shape)
        return self._norm(x)


class AppendsToDeque(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recent.append(1)
        return self._norm(x)


class AppendsDeeper(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.by_name["all"].append(1)
        return self._norm(x)


class AppendsToGlobal(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return self._norm(x)


class CountsInDictionary(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNTS["calls"] += 1
        return self._norm(x)


class CountsGlobally(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global TOTAL  # that is what it is about
        TOTAL += 1
        return self._norm(x)


class Meter:
    def __init__(self) -> None:
        self.calls, self.sizes = 0, [0]

    def count(self) -> None:
        self.calls += 1

    def keep(self, size: int) -> None:
        self.sizes.append(size)


class CountsInObject(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.count()
        return self._norm(x)


class KeepsInObject(CountsInObject):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.keep(1)
        return self._norm(x)


def counting() -> tuple[type[Norm], type[Norm], list[int]]:
    """Return two classes that count in what they enclose, and where the second does."""
    calls, kept = 0, list[int]()

    class CountsInClosure(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return self._norm(x)

    class AppendsToClosure(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(1)
            return self._norm(x)

    return CountsInClosure, AppendsToClosure, kept


CountsInClosure, AppendsToClosure, KEPT = counting()


class Prints(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("called")  # noqa: T201  # that is what it is about
        return self._norm(x)


METER, SUMS, HITS, TOTALS = Meter(), Counter[str](), defaultdict[str, int](int), torch.zeros(1)
TICKS = itertools.count()
KEEP = CALLS.append


class Register:
    """A class that counts for whoever asks."""

    total = 0
    entries: list[int]

    @classmethod
    def note(cls) -> None:
        cls.total += 1


class CountsInGlobalObject(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        METER.count()
        return self._norm(x)


class UpdatesGlobalDictionary(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SUMS.update(["calls"])
        return self._norm(x)


class ReadsDefaultDictionary(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x) * (1 + 0 * HITS["calls"])


class AddsToGlobalTensor(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TOTALS.add_(1)
        return self._norm(x)


class TakesTheNextNumber(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        next(TICKS)
        return self._norm(x)


class CallsBoundMethod(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEEP(1)
        return self._norm(x)


class CountsInClass(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Register.note()
        return self._norm(x)


class AppendsToClassAttribute(Norm):
    shared: list[int] = []  # noqa: RUF012  # that is what it is about

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.shared
        kept += [1]
        return self._norm(x)


class CountsInModule(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graft_counting.note()
        return self._norm(x)


class AppendsInModule(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = graft_counting.SEEN
        kept += [1]
        return self._norm(x)


def note(seen: list[int] = []) -> None:  # noqa: B006  # that is what it is about
    seen += [1]


class AppendsToDefault(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        note()
        return self._norm(x)


class CountsInProperty(Norm):
    @property
    def scale(self) -> float:
        METER.count()
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x) * self.scale


class CountsInParent(CountsInGlobalObject):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counting(*args: Any) -> Any:
        METER.count()
        return function(*args)

    return counting


class CountsInDecorator(Norm):
    @counted
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x)


class CountsInAttribute(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.act = functools.partial(counted(torch.mul), other=1.0)
        self.before = METER.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        return self._norm(x)


class Deep:
    def __init__(self) -> None:
        self.inner = Meter()


class AppendsDeepInAttribute(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.config = Deep()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.config.inner.sizes.append(1)
        return self._norm(x)


def enclosing() -> type[Norm]:
    meter = METER

    class CountsInEnclosedObject(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            meter.count()
            return self._norm(x)

    return CountsInEnclosedObject


CountsInEnclosedObject = enclosing()


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (CountsInGlobalObject, "uses METER"),
        (UpdatesGlobalDictionary, "uses SUMS"),
        (ReadsDefaultDictionary, "uses HITS"),
        (AddsToGlobalTensor, "uses TOTALS"),
        (TakesTheNextNumber, "uses TICKS"),
        (CallsBoundMethod, "uses KEEP"),
        (CountsInClass, "writes to total"),
        (AppendsToClassAttribute, "uses shared"),
        (CountsInModule, "writes to an element"),
        (AppendsInModule, "uses SEEN"),
        (AppendsToDefault, "uses seen"),
        (CountsInProperty, "uses METER"),
        (CountsInParent, "uses METER"),
        (CountsInDecorator, "uses METER"),
        (CountsInAttribute, "uses before"),
        (AppendsDeepInAttribute, "changes sizes"),
        (CountsInEnclosedObject, "uses meter"),
    ],
)
def test_a_forward_that_writes_to_what_it_does_not_own_stays(cls: type[Norm], reason: str) -> None:
    """Wherever a forward keeps account of its calls, its module stays, and grafting calls nothing that counts."""
    model = nn.Sequential(cls())
    before = repr(
        (vars(METER), CALLS, TOTALS, SUMS, HITS, TICKS, Register.total, graft_counting.SEEN)
    )
    report = graft(model)
    assert len(report.left_alone) == 1
    assert f"its forward {reason}" in report.left_alone[0].reason
    assert (
        repr((vars(METER), CALLS, TOTALS, SUMS, HITS, TICKS, Register.total, graft_counting.SEEN))
        == before
    )


FACTORS = {"one": 1.0}


class ReadsConstants(Norm):
    """A norm that looks up what nobody changes."""

    factors = FACTORS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import math as of_numbers

        return (
            self._norm(x)
            * FACTORS["one"]
            * self.factors["one"]
            * math.cos(0.0)
            * of_numbers.cos(0.0)
        )


def test_a_forward_that_only_reads_is_replaced() -> None:
    """Tables of constants, functions of modules and torch's own are no reason to stay."""
    assert [row.op for row in graft(nn.Sequential(ReadsConstants())).replaced] == ["rms_norm"]


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (SetsAttribute, "its forward writes to last"),
        (SetsInHelper, "its forward writes to last"),
        (Appends, "its forward changes calls"),
        (AppendsToDeque, "its forward changes recent"),
        (AppendsDeeper, "its forward changes by_name"),
        (AppendsToGlobal, "its forward uses CALLS, and whoever reads that would miss its calls"),
        (CountsInDictionary, "its forward writes to an element"),
        (CountsGlobally, "its forward writes to TOTAL"),
        (CountsInObject, "its forward changes meter"),
        (KeepsInObject, "its forward changes meter"),
        (CountsInClosure, "its forward writes to calls"),
        (AppendsToClosure, "its forward uses kept, and whoever reads that would miss its calls"),
        (Prints, "its forward uses print, and whoever reads that would miss its calls"),
    ],
)
def test_a_forward_that_does_more_than_return_a_result_stays(cls: type[Norm], reason: str) -> None:
    """An op would not write what other code reads, so the module stays, and looking at it writes nothing either."""
    model = nn.Sequential(cls())
    report = graft(model)
    assert [row.reason for row in report.left_alone] == [f"no adapter recognises it: {reason}"]
    assert (model[0].calls, list(model[0].recent), model[0].by_name) == ([], [], {"all": []})
    assert (CALLS, COUNTS, TOTAL, KEPT) == ([], {"calls": 0}, 0, [])
    meter = getattr(model[0], "meter", Meter())
    assert (meter.calls, meter.sizes) == (0, [0])


def test_a_forward_without_side_effects_is_replaced() -> None:
    """Containers that the forward does not touch are no reason to stay."""
    assert [row.op for row in graft(nn.Sequential(Norm())).replaced] == ["rms_norm"]
