"""Exchanges of two ranks with norms and products, as functions for the ranks of a benchmark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import opgraft
import torch
from opgraft import CompilationConfig, functional
from opgraft.distributed import get_tp_group, tensor_model_parallel_all_reduce
from opgraft.ops import ColumnParallelLinear, RMSNorm, RowParallelLinear, SiluAndMul
from torch import Tensor, nn

ROWS = (1, 32, 512)
HIDDEN = 2048
SIZES = ((2048, 5632), (576, 1536))
"""Hidden and intermediate sizes of a layer."""
EPS = 1e-5
TENSOR, TOKEN = (-1, -1), (1, -1)
FORMS = (
    "sum of ranks and norm",
    "sum of ranks and norm, given scale",
    "sum of ranks and norm, by token",
)
PRODUCTS = ("product and reduce-scatter", "all-gather and product")
OVERLAP = "async_tensor_parallelism"
BY_ROWS, BY_COLUMNS = "in two parts", "in two parts of columns"
REPEATS = 15
"""Calls of a side in a round."""
LAYERS = 4
"""Layers of a call with the pass and without it."""

Sides = Sequence[Callable[[], object]]


def compare(
    state: dict[str, Any], form: str, rows: int, dtype: str, rounds: int
) -> list[tuple[float, float]]:
    """Return seconds per call of the joined form and of one after the other, for each round."""
    sides = _SIDES[form](rows, getattr(torch, dtype))
    found: list[tuple[float, float]] = []
    with torch.inference_mode():
        for number in range(rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {side: min(_calls(sides[side])) for side in order}
            found.append((seconds[0], seconds[1]))
    del state
    # The first round warms up.
    return found[1:]


class Times(NamedTuple):
    """Seconds of calls of a rank, by the clock. All ranks begin a call together.

    Attributes:
        product: the product, beside the exchange of the same call.
        both: product and exchange, one after the other.
        work: the same without the time that the rank waits for the other one.
        divided: the product in two parts, by the kind of parts.
    """

    product: list[float]
    both: list[float]
    work: list[float]
    divided: dict[str, list[float]]


def product_times(
    state: dict[str, Any], form: str, rows: int, hidden: int, intermediate: int, rounds: int
) -> Times:
    """Measure a product and an exchange, one after the other."""
    chain = _CHAINS[form](rows, hidden, intermediate)
    divided = {kind: call for kind, call in chain.divided.items() if rows > 1 or kind != BY_ROWS}
    times = Times([], [], [], {kind: [] for kind in divided})
    with torch.inference_mode():
        for number in range(rounds + 1):
            of_round = [_chained(chain) for _ in range(REPEATS)]
            parts = {kind: _calls(call) for kind, call in divided.items()}
            # The first round warms up.
            if number == 0:
                continue
            for product, both, waited in of_round:
                times.product.append(product)
                times.both.append(both)
                times.work.append(both - waited)
            for kind, seconds in parts.items():
                times.divided[kind] += seconds
    del state
    return times


class OfPass(NamedTuple):
    """Calls of layers with ``async_tensor_parallelism`` and without it.

    Attributes:
        pairs: median seconds with the pass and without it, by round.
        replaced: the number of places that the pass has changed.
    """

    pairs: list[tuple[float, float]]
    replaced: int


def pass_times(
    state: dict[str, Any], rows: int, hidden: int, intermediate: int, rounds: int
) -> OfPass:
    """Measure layers with the pass and without it."""
    model = _Layers(hidden, intermediate).eval().requires_grad_(False)
    opgraft.freeze(model)
    x = torch.randn(max(rows, 4), hidden, generator=torch.Generator().manual_seed(0))
    compiled = [_compiled(model, x[:4], on) for on in (True, False)]
    sides = [partial(each, x[:rows]) for each in compiled]
    found: list[tuple[float, float]] = []
    with torch.inference_mode():
        for number in range(rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {side: statistics.median(_calls(sides[side])) for side in order}
            found.append((seconds[0], seconds[1]))
    del state
    replaced = sum(each.replaced for each in compiled[0].passes if each.name == OVERLAP)
    # The first round warms up.
    return OfPass(found[1:], replaced)


def _compiled(model: nn.Module, example: Tensor, on: bool) -> Any:
    """Compile with the passes that leave an exchange beside each product, and with ours or without it."""
    switches = {"sequence_parallelism": True, OVERLAP: on}
    config = CompilationConfig(level=1, pass_config=switches)
    return opgraft.compile(model, config, args=(example,))


class _Layers(nn.Module):
    """Feed-forward layers of a residual stream, which two ranks share."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        given: dict[str, Any] = {"bias": False, "return_bias": False}
        self.norms = nn.ModuleList(RMSNorm(hidden) for _ in range(LAYERS))
        self.ups = nn.ModuleList(
            ColumnParallelLinear(hidden, 2 * intermediate, **given) for _ in range(LAYERS)
        )
        self.downs = nn.ModuleList(
            RowParallelLinear(intermediate, hidden, **given) for _ in range(LAYERS)
        )
        self.activation = SiluAndMul()
        # Norms stay those of all ranks: each rank draws its own numbers.
        for weight in (*self.ups.parameters(), *self.downs.parameters()):
            nn.init.normal_(weight, std=hidden**-0.5)

    def forward(self, x: Tensor) -> list[Tensor]:
        normed, residual = x, x
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            normed, residual = norm(down(self.activation(up(normed))), residual)
        return [normed, residual]


def _calls(call: Callable[[], object]) -> list[float]:
    """Return the seconds of a few calls, each once all ranks are there."""
    found: list[float] = []
    for _ in range(REPEATS):
        _meet()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def _meet() -> None:
    get_tp_group().all_reduce(torch.zeros(1))


class _Chain(NamedTuple):
    """A product and an exchange, one after the other.

    Attributes:
        given: the first step's argument.
        steps: both steps, in order. The second one takes the result of the first.
        product: the number of the product among the steps.
        divided: computes the product in two parts, by the kind of parts that can be exchanged.
    """

    given: Tensor
    steps: tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]
    product: int
    divided: dict[str, Callable[[], object]]


def _chained(chain: _Chain) -> tuple[float, float, float]:
    """Return the seconds of a product, of product and exchange, and of waiting for the other rank.

    The communicator counts the waiting. Processor time does not tell it apart: a rank spins first.
    """
    communicator: Any = get_tp_group().communicator
    _meet()
    *_, waited_before = communicator.shared.used()
    seconds: list[float] = []
    x = chain.given
    for step in chain.steps:
        start = time.perf_counter()
        x = step(x)
        seconds.append(time.perf_counter() - start)
    *_, waited = communicator.shared.used()
    return seconds[chain.product], sum(seconds), waited - waited_before


def _norm(rows: int, dtype: torch.dtype) -> Sides:
    x, residual = (torch.randn(rows, HIDDEN).to(dtype) for _ in range(2))
    weight = torch.randn(HIDDEN).to(dtype)

    def apart() -> object:
        summed = tensor_model_parallel_all_reduce(x)
        return functional.fused_add_rms_norm(summed, residual, weight, EPS)

    return (lambda: functional.all_reduce_rms_norm(x, residual, weight, EPS), apart)


def _norm_by_given_scale(rows: int, dtype: torch.dtype) -> Sides:
    x, residual = (torch.randn(rows, HIDDEN).to(dtype) for _ in range(2))
    weight, scale = torch.randn(HIDDEN).to(dtype), torch.tensor([0.02])

    def apart() -> object:
        summed = tensor_model_parallel_all_reduce(x)
        normed, total = functional.fused_add_rms_norm(summed, residual, weight, EPS)
        return functional.quant_fp8_static(normed, scale, TENSOR), total

    form = functional.all_reduce_rms_norm_quant_fp8_static
    return (lambda: form(x, residual, scale, TENSOR, weight, EPS), apart)


def _norm_by_token(rows: int, dtype: torch.dtype) -> Sides:
    x, residual = (torch.randn(rows, HIDDEN).to(dtype) for _ in range(2))
    weight = torch.randn(HIDDEN).to(dtype)

    def apart() -> object:
        summed = tensor_model_parallel_all_reduce(x)
        normed, total = functional.fused_add_rms_norm(summed, residual, weight, EPS)
        return functional.quant_fp8_dynamic(normed, TOKEN), total

    form = functional.all_reduce_rms_norm_quant_fp8_dynamic
    return (lambda: form(x, residual, TOKEN, weight, EPS), apart)


def _scattered(rows: int, hidden: int, intermediate: int) -> _Chain:
    x = torch.randn(rows, intermediate // 2)
    weight = _weight(hidden, intermediate // 2)
    halves = [_weight(hidden // 2, intermediate // 2) for _ in range(2)]

    def multiply(x: Tensor) -> Any:
        return functional.linear(x, weight)

    def exchange(x: Tensor) -> Any:
        return torch.ops.opgraft.reduce_scatter_rows(x, 2, "tensor")

    divided: dict[str, Callable[[], object]] = {
        BY_ROWS: partial(_by_rows, x, weight),
        BY_COLUMNS: lambda: [functional.linear(x, half) for half in halves],
    }
    return _Chain(x, (multiply, exchange), 0, divided)


def _gathered(rows: int, hidden: int, intermediate: int) -> _Chain:
    part, whole = torch.randn((rows + 1) // 2, hidden), torch.randn(rows, hidden)
    # A rank has half the columns of gate and up.
    weight = _weight(intermediate, hidden)

    def exchange(x: Tensor) -> Any:
        return torch.ops.opgraft.all_gather_rows(x, rows, 2, "tensor")[:rows]

    def multiply(x: Tensor) -> Any:
        return functional.linear(x, weight)

    # Each column of the product needs all rows of the other rank.
    divided: dict[str, Callable[[], object]] = {BY_ROWS: partial(_by_rows, whole, weight)}
    return _Chain(part, (exchange, multiply), 1, divided)


def _by_rows(x: Tensor, weight: Any) -> object:
    return [functional.linear(part, weight) for part in x.chunk(2)]


def _weight(outputs: int, inputs: int) -> Any:
    """Make a weight as that of a model which has been frozen."""
    layer = opgraft.ops.Linear(inputs, outputs, bias=False)
    layer.requires_grad_(False)
    opgraft.freeze(layer)
    return layer.weight


_SIDES: dict[str, Callable[[int, torch.dtype], Sides]] = {
    FORMS[0]: _norm,
    FORMS[1]: _norm_by_given_scale,
    FORMS[2]: _norm_by_token,
}

_CHAINS: dict[str, Callable[[int, int, int], _Chain]] = {
    PRODUCTS[0]: _scattered,
    PRODUCTS[1]: _gathered,
}
