"""The benchmark of whole models tells limits that are missed from those that no machine of the kind could keep."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from opgraft.ops import GatedMLP, RMSNorm
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a module of the benchmarks, which are scripts that find each other in their folders."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_a_limit_that_the_machine_does_not_allow_is_told_apart(load: Load) -> None:
    """What is over its limit is a failure only where the limit can be reached."""
    row = load("timing").Row
    assert row("within", 0.4, 0.5, "").verdict == "ok"
    assert row("over", 0.6, 0.5, "", 0.4).verdict == "over"
    assert not row("over", 0.6, 0.5, "", 0.4).ok
    assert row("beyond", 0.6, 0.5, "", 0.55).verdict == "beyond"
    assert row("beyond", 0.6, 0.5, "", 0.55).ok
    assert row("far beyond", 0.7, 0.5, "", 0.55).verdict == "over"
    assert row("no limit", 0.6, None, "").verdict == ""


def test_what_is_possible_is_reading_or_multiplying(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer takes at least the time in which its weight is read, and that of its products; what is no layer, none."""
    models = load("models")
    found = {"bytes_per": {"seconds": 100.0}, "products_per": {"seconds": 50.0}}
    monkeypatch.setattr(models, "speeds", lambda size, dtype: lambda: found)
    monkeypatch.setattr(models, "_product", lambda rows, weight, dtype: 7)
    monkeypatch.setattr(
        models, "taken", lambda call, _: {"seconds": call if isinstance(call, int) else 0}
    )
    layer = nn.Linear(5, 10, bias=False)

    def least(*rows: int) -> float:
        seconds: float = models._bound(layer, lambda: layer(torch.ones(*rows, 5)), torch.float32)()
        return seconds

    assert least(1) == pytest.approx(200 / 100)
    assert least(2, 3) == pytest.approx(6 * 50 / 50)
    assert least(models.MANY_ROWS) == pytest.approx(7)


class Recorded(nn.Linear):
    """A layer that counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_what_is_possible_has_the_python_around_ops(load: Load) -> None:
    """Ops answer without computing; the rest of the run is as it was."""
    layers, head, seen = (
        nn.ModuleList([Recorded(4, 4), nn.Sequential(Recorded(4, 4))]),
        Recorded(4, 4),
        [],
    )

    def run() -> torch.Tensor:
        x = torch.ones(1, 4)
        for layer in (*layers, head):
            x = layer(x)
        seen.append(x)
        return x

    around = load("models")._without([*layers, head], run)
    around()
    around()
    linears = [layers[0], layers[1][0], head]
    assert [layer.calls for layer in linears] == [1, 1, 1]
    run()
    assert [layer.calls for layer in linears] == [2, 2, 2]
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_ops_are_those_that_a_grafted_model_calls_itself(load: Load) -> None:
    """Ops within another op are not called by the model."""
    mlp, norm = GatedMLP(4, 8), RMSNorm(4)
    model = nn.Sequential(nn.Sequential(mlp), nn.Linear(4, 4), norm)
    assert load("models")._outermost_ops(model) == [mlp, norm]
