"""Exchanges of two ranks with norms and products, as functions for the ranks of a benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

ROWS = (1, 32, 512)
HIDDEN = 2048
SIZES = ((2048, 5632), (576, 1536))
"""Hidden and intermediate sizes of a layer."""
EPS = 1e-5
TOKEN = (1, -1)
FORMS = ("sum of ranks and norm", "sum of ranks and norm, by token")
PRODUCTS = ("product and reduce-scatter", "all-gather and product")
BY_ROWS, BY_COLUMNS = "in two parts", "in two parts of columns"
REPEATS = 15
"""Calls of a side in a round."""

Sides = Sequence[Callable[[], object]]


def compare(
    state: dict[str, Any], form: str, rows: int, dtype: str, rounds: int
) -> list[tuple[float, float]]:
    """Return seconds per call of the joined form and of one after the other, for each round."""
    import torch

    sides = _SIDES[form](rows, dtype)
    found: list[tuple[float, float]] = []
    with torch.inference_mode():
        for number in range(rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {side: _seconds(sides[side]) for side in order}
            found.append((seconds[0], seconds[1]))
    del state
    # The first round warms up.
    return found[1:]


class Times(NamedTuple):
    """The least seconds of a product and an exchange. Products are timed by processor time.

    Attributes:
        product: the product at once.
        exchange: the exchange by the clock.
        work: the exchange less the time that the rank waits for the other one. A rank has one
            processor, which cannot compute meanwhile.
        divided: the product in two parts, by the kind of parts.
    """

    product: float
    exchange: float
    work: float
    divided: dict[str, float]


def product_times(
    state: dict[str, Any], form: str, rows: int, hidden: int, intermediate: int, rounds: int
) -> Times:
    """Measure a product beside an exchange."""
    import torch

    product, exchange, divided = _SIDES_OF_PRODUCTS[form](rows, hidden, intermediate)
    if rows == 1:
        divided.pop(BY_ROWS)
    alone: list[float] = []
    exchanged: list[float] = []
    work: list[float] = []
    parts: dict[str, list[float]] = {kind: [] for kind in divided}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            alone.append(_seconds_of_thread(product))
            calls = _calls(exchange)
            exchanged.append(min(seconds for seconds, _ in calls))
            work.append(min(seconds - waited for seconds, waited in calls))
            for kind, call in divided.items():
                parts[kind].append(_seconds_of_thread(call))
    del state
    # The first round warms up.
    least = {kind: min(seconds[1:]) for kind, seconds in parts.items()}
    return Times(min(alone[1:]), min(exchanged[1:]), min(work[1:]), least)


def _seconds_of_thread(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call, the least of a few, once all ranks are there."""
    return min(seconds for seconds, _ in _calls(call))


def _calls(call: Callable[[], object]) -> list[tuple[float, float]]:
    """Return the seconds of a few calls, and those of them in which this rank waits.

    The communicator counts the waiting. Processor time does not tell it apart: a rank spins first.
    """
    import torch
    from opgraft.distributed import get_tp_group

    communicator: Any = get_tp_group().communicator
    found: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        get_tp_group().all_reduce(torch.zeros(1))
        *_, waited_before = communicator.shared.used()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        *_, waited = communicator.shared.used()
        found.append((seconds, waited - waited_before))
    return found


def _norm(rows: int, dtype: str) -> Sides:
    import torch
    from opgraft import functional
    from opgraft.distributed import tensor_model_parallel_all_reduce

    kind = getattr(torch, dtype)
    x, residual = (torch.randn(rows, HIDDEN).to(kind) for _ in range(2))
    weight = torch.randn(HIDDEN).to(kind)

    def apart() -> object:
        summed = tensor_model_parallel_all_reduce(x)
        return functional.fused_add_rms_norm(summed, residual, weight, EPS)

    return (lambda: functional.all_reduce_rms_norm(x, residual, weight, EPS), apart)


def _quantized_norm(rows: int, dtype: str) -> Sides:
    import torch
    from opgraft import functional
    from opgraft.distributed import tensor_model_parallel_all_reduce

    kind = getattr(torch, dtype)
    x, residual = (torch.randn(rows, HIDDEN).to(kind) for _ in range(2))
    weight = torch.randn(HIDDEN).to(kind)

    def apart() -> object:
        summed = tensor_model_parallel_all_reduce(x)
        normed, total = functional.fused_add_rms_norm(summed, residual, weight, EPS)
        return functional.quant_fp8_dynamic(normed, TOKEN), total

    form = functional.all_reduce_rms_norm_quant_fp8_dynamic
    return (lambda: form(x, residual, TOKEN, weight, EPS), apart)


class _Product(NamedTuple):
    """A product beside an exchange.

    Attributes:
        whole: computes the product at once.
        exchange: exchanges as many rows as the product has.
        divided: computes the product in two parts, by the kind of parts that can be exchanged.
    """

    whole: Callable[[], object]
    exchange: Callable[[], object]
    divided: dict[str, Callable[[], object]]


def _scattered(rows: int, hidden: int, intermediate: int) -> _Product:
    import torch
    from opgraft import functional

    x = torch.randn(rows, intermediate // 2)
    weight = _weight(hidden, intermediate // 2)
    halves = [_weight(hidden // 2, intermediate // 2) for _ in range(2)]
    exchange = partial(
        torch.ops.opgraft.reduce_scatter_rows, torch.randn(rows, hidden), 2, "tensor"
    )
    divided: dict[str, Callable[[], object]] = {
        BY_ROWS: partial(_by_rows, x, weight),
        BY_COLUMNS: lambda: [functional.linear(x, half) for half in halves],
    }
    return _Product(partial(functional.linear, x, weight), exchange, divided)


def _gathered(rows: int, hidden: int, intermediate: int) -> _Product:
    import torch
    from opgraft import functional

    part, whole = torch.randn((rows + 1) // 2, hidden), torch.randn(rows, hidden)
    # A rank has half the columns of gate and up.
    weight = _weight(intermediate, hidden)

    exchange = partial(torch.ops.opgraft.all_gather_rows, part, rows, 2, "tensor")
    # Each column of the product needs all rows of the other rank.
    divided: dict[str, Callable[[], object]] = {BY_ROWS: partial(_by_rows, whole, weight)}
    return _Product(partial(functional.linear, whole, weight), exchange, divided)


def _by_rows(x: Any, weight: Any) -> object:
    from opgraft import functional

    return [functional.linear(part, weight) for part in x.chunk(2)]


def _weight(outputs: int, inputs: int) -> Any:
    """Make a weight as that of a model which has been frozen."""
    import opgraft

    layer = opgraft.ops.Linear(inputs, outputs, bias=False)
    layer.requires_grad_(False)
    opgraft.freeze(layer)
    return layer.weight


_SIDES: dict[str, Callable[[int, str], Sides]] = {FORMS[0]: _norm, FORMS[1]: _quantized_norm}

_SIDES_OF_PRODUCTS: dict[str, Callable[[int, int, int], _Product]] = {
    PRODUCTS[0]: _scattered,
    PRODUCTS[1]: _gathered,
}
