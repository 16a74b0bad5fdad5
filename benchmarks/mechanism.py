"""Costs of the mechanism, apart from any kernel: calling, constructing and compiling ops, and ``opgraft detect``.

Both sides of a ratio do the same arithmetic, as little of it as possible, so that a difference is the mechanism's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import opgraft
import torch
from opgraft import functional
from opgraft.ops import ReLUSquaredActivation, RMSNorm
from timing import Row, difference, ratio, report
from torch import nn

WIDTH = 4
BATCH_SIZES = (2, 3, 4, 5, 7, 8, 16, 33, 64, 100)


class PlainScale(nn.Module):
    """The ops below without opgraft."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@opgraft.CustomOp.register("benchmark_scale")
class Scale(opgraft.CustomOp):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@opgraft.CustomOp.register("benchmark_replaced_scale")
class ReplacedScale(Scale):
    """The same op, which has a replacement."""


@opgraft.CustomOp.register_oot("benchmark_replaced_scale")
class OotScale(ReplacedScale):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def calls() -> list[Row]:
    if opgraft.maybe_get_oot_by_class(ReplacedScale) is not OotScale:
        raise RuntimeError(
            "the replacement is not in force: these figures would not be those of a replaced op"
        )
    x = torch.ones(WIDTH)
    plain = PlainScale(WIDTH)
    return [
        ratio(
            f"call {name} / plain module",
            1.02,
            partial(op, x),
            partial(plain, x),
            number=10_000,
            rounds=41,
        )
        for name, op in (("op", Scale(WIDTH)), ("replaced op", ReplacedScale(WIDTH)))
    ]


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@opgraft.CustomOp.register_oot("ReLUSquaredActivation")
class OotSquare(ReLUSquaredActivation):
    """A kernel without a backward: the form must look whether a gradient is required."""

    @opgraft.inference_only
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return square(x)

    functional_oot: ClassVar[dict[str, Callable[..., torch.Tensor]]] = {"relu2": square}


def functional_calls() -> list[Row]:
    """Measure forms over the function that they reach: a native definition, and a replacement's guarded kernel."""
    x = torch.ones(WIDTH)
    if not torch.equal(functional.relu2(-x), x):
        raise RuntimeError(
            "the replacement is not in force: these figures would not be those of a replaced op"
        )
    sides = [
        ("silu", functional.silu, functional.silu.native),
        ("replaced relu2", functional.relu2, square),
    ]
    return [
        difference(
            f"call form {name} - its kernel, µs",
            1.0,
            partial(f, x),
            partial(kernel, x),
            number=10_000,
            rounds=41,
        )
        for name, f, kernel in sides
    ]


def constructions() -> list[Row]:
    plain = partial(PlainScale, WIDTH)
    return [
        ratio(
            f"construct {name} / plain module",
            1.3,
            partial(op, WIDTH),
            plain,
            number=2_000,
            rounds=41,
        )
        for name, op in (("op", Scale), ("replaced op", ReplacedScale))
    ]


def start_up() -> list[Row]:
    """Measure whole processes, with compiled bytecode as installed packages have it; the warm-up may have to write it.

    ``OPGRAFT_PLUGINS`` empty: built-in platforms only, whatever else is installed.
    """
    command = shutil.which("opgraft", path=str(Path(sys.executable).parent))
    if command is None:
        raise FileNotFoundError(f"no command 'opgraft' beside {sys.executable}: run 'make bench'")
    environ = {**os.environ, "OPGRAFT_PLUGINS": "", "PYTHONDONTWRITEBYTECODE": ""}

    def process(*arguments: str) -> Callable[[], object]:
        return partial(
            subprocess.run, arguments, env=environ, check=True, stdout=subprocess.DEVNULL
        )

    detect, baseline = process(command, "detect"), process(sys.executable, "-c", "import torch")
    return [
        ratio(
            "opgraft detect / python -c 'import torch'", 0.09, detect, baseline, number=1, rounds=15
        )
    ]


def compilation() -> list[Row]:
    """Compile a stack of twelve ops with ``torch.compile``; the backend counts the graphs that it is handed."""
    norms = [RMSNorm(WIDTH) for _ in range(4)]
    stack = nn.Sequential(
        *(op for norm in norms for op in (norm, Scale(WIDTH), ReplacedScale(WIDTH)))
    )
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compile(stack, backend=count)(torch.ones(2, WIDTH))
    breaks = len(graphs) - 1
    torch.compiler.reset()
    graphs.clear()
    compiled = torch.compile(stack, backend=count, fullgraph=True, dynamic=True)
    for batch_size in BATCH_SIZES:
        x = torch.randn(batch_size, WIDTH)
        torch.testing.assert_close(compiled(x), stack(x))
    sizes = f"{len(stack)} ops, batch sizes {', '.join(map(str, BATCH_SIZES))}"
    return [
        Row("graph breaks of a compiled stack", breaks, 0, f"{len(stack)} ops"),
        Row("compilations of a dynamic stack", len(graphs), 1, sizes),
    ]


def measure() -> list[Row]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = [*calls(), *functional_calls()]
    return [*rows, *constructions(), *start_up(), *compilation()]


if __name__ == "__main__":
    report("What the mechanism of opgraft costs.", measure)
