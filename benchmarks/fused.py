"""Kernels that compute several ops at once against the kernels of each, in one process and on two ranks of a host.

Sizes are those of small models. Both sides are functional forms as compiled code calls them; calls alternate. Kernels
in one process are timed by the processor time of one thread. Those of ranks, which wait for each other, are timed by
the clock. Of norms, the least of several calls counts, as other work on the machine only adds. Of products, the median
counts, because the least has no waiting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from engine_rows import Finding, print_findings
from fused_ranks import (
    FORMS,
    OVERLAP,
    PRODUCTS,
    ROWS,
    SIZES,
    Times,
    compare,
    pass_times,
    product_times,
)
from opgraft import functional
from parallel_ranks import Ranks, prefer
from timing import machine, this_run
from torch import Tensor

HIDDEN, INTERMEDIATE, HEADS, HEAD_SIZE = 2048, 5632, 16, 64
EPS = 1e-5
TENSOR, TOKEN = (-1, -1), (1, -1)
MOST = 0.95
"""The most that layers may take with the pass, by the time without it."""
DTYPES = (torch.float32, torch.bfloat16)
SECONDS = 0.005
"""The time that one side of a round takes, about."""
Sides = tuple[Callable[[], object], Callable[[], object]]
"""The joined kernel, and one kernel after the other."""


def norm(rows: int, dtype: torch.dtype) -> Iterator[tuple[str, Sides]]:
    """Return a norm that is quantised, with and without a sum before."""
    x, residual = _drawn(dtype, rows, HIDDEN), _drawn(dtype, rows, HIDDEN)
    weight, scale = _drawn(dtype, HIDDEN), torch.tensor([0.02])

    def one_after_the_other() -> object:
        return functional.quant_fp8_static(functional.rms_norm(x, weight, EPS), scale, TENSOR)

    def by_token() -> object:
        return functional.quant_fp8_dynamic(functional.rms_norm(x, weight, EPS), TOKEN)

    def after_sum() -> object:
        normed, summed = functional.fused_add_rms_norm(x, residual, weight, EPS)
        return functional.quant_fp8_dynamic(normed, TOKEN), summed

    def after_sum_by_given() -> object:
        normed, summed = functional.fused_add_rms_norm(x, residual, weight, EPS)
        return functional.quant_fp8_static(normed, scale, TENSOR), summed

    static = partial(functional.rms_norm_quant_fp8_static, x, scale, TENSOR, weight, EPS)
    dynamic = partial(functional.rms_norm_quant_fp8_dynamic, x, TOKEN, weight, EPS)
    summed = functional.fused_add_rms_norm_quant_fp8_dynamic
    given = functional.fused_add_rms_norm_quant_fp8_static
    yield "norm, given scale", (static, one_after_the_other)
    yield "norm, by token", (dynamic, by_token)
    summed_by_given = partial(given, x, residual, scale, TENSOR, weight, EPS)
    yield "sum and norm, given scale", (summed_by_given, after_sum_by_given)
    yield "sum and norm, by token", (partial(summed, x, residual, TOKEN, weight, EPS), after_sum)


def product(rows: int, dtype: torch.dtype) -> Iterator[tuple[str, Sides]]:
    """Return a gated activation that is quantised."""
    x, scale = _drawn(dtype, rows, 2 * INTERMEDIATE), torch.tensor([0.02])

    def one_after_the_other() -> object:
        return functional.quant_fp8_static(functional.silu_and_mul(x), scale, TENSOR)

    def by_token() -> object:
        return functional.quant_fp8_dynamic(functional.silu_and_mul(x), TOKEN)

    static = partial(functional.silu_and_mul_quant_fp8_static, x, scale, TENSOR)
    dynamic = partial(functional.silu_and_mul_quant_fp8_dynamic, x, TOKEN)
    yield "SiLU and product, given scale", (static, one_after_the_other)
    yield "SiLU and product, by token", (dynamic, by_token)


def attention(rows: int, dtype: torch.dtype) -> Iterator[tuple[str, Sides]]:
    """Return attention of so many tokens to as many, whose result is quantised in rows of contiguous memory.

    Registered ops return contiguous results, so the separate kernels copy heads before they quantise them.
    """
    query, key, value = (_drawn(dtype, 1, rows, HEADS, HEAD_SIZE).transpose(1, 2) for _ in range(3))
    scale = torch.tensor([0.02])

    def one_after_the_other() -> object:
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return functional.quant_fp8_static(attended.contiguous(), scale, TENSOR)

    form = functional.scaled_dot_product_attention_quant_fp8_static
    yield (
        "attention, given scale",
        (partial(form, query, key, value, scale, is_causal=True), one_after_the_other),
    )


def _drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


def kernels(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare each joined kernel with the separate ones, in this process."""
    for dtype in DTYPES:
        for rows in ROWS:
            for sides_of in (norm, product, attention):
                for name, sides in sides_of(rows, dtype):
                    label = f"{name}, {rows} rows, {_name(dtype)}"
                    found = measure(sides, arguments.rounds)
                    yield _finding(label, found, arguments.rounds, most=1.0)


def measure(sides: Sides, rounds: int) -> list[tuple[float, float]]:
    """Return seconds per call of both sides, for each round. The first side alternates."""
    numbers = [max(1, int(SECONDS / _seconds(side, 1))) for side in sides]
    found = []
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {side: _seconds(sides[side], numbers[side]) for side in order}
        found.append((seconds[0], seconds[1]))
    # The first round warms up.
    return found[1:]


def _seconds(call: Callable[[], object], number: int) -> float:
    call()
    start = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - start) / number


def ranks(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare sums over two ranks that are normed at once with one after the other."""
    with Ranks(2) as two:
        two.run(prefer, -20)
        for dtype in map(_name, DTYPES):
            for rows in ROWS:
                for form in FORMS:
                    found = two.run(compare, form, rows, dtype, arguments.rounds)[0]
                    least = [
                        (min(ours), min(theirs)) for ours, theirs in [zip(*found, strict=True)]
                    ]
                    label = f"{form}, {rows} rows, {dtype}, two ranks"
                    yield _finding(label, least, len(found), most=1.0)


def products(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Tell what exchange and product at once could gain on two ranks of a host, and what the pass gains.

    Product and exchange are timed one after the other, and a median is that of the calls of both ranks. An exchange
    through memory is work of the rank's own processor: only what the exchange waits could be hidden. So the time
    without waiting bounds what the pass can gain. A rank that sends some rows while it computes others divides the
    product.
    """
    for hidden, intermediate in SIZES:
        with Ranks(2) as two:
            two.run(prefer, -20)
            for rows in ROWS:
                sizes = (rows, hidden, intermediate)
                of = f"{rows} rows, {hidden:,} by {intermediate:,}, two ranks"
                bounds = []
                for form in PRODUCTS:
                    found = two.run(product_times, form, *sizes, arguments.rounds)
                    shares = list(product_shares(found, f"{form}, {of}", arguments.rounds))
                    bounds.append(shares[1].measured)
                    yield from shares
                of_pass = two.run(pass_times, *sizes, arguments.rounds)
                pairs = list(chain.from_iterable(rank.pairs for rank in of_pass))
                label = f"layers, {of}, {OVERLAP} on / off"
                gain = _finding(label, pairs, arguments.rounds, most=MOST, bound=min(bounds))
                places = f"{gain.detail}, {of_pass[0].replaced} places changed"
                yield replace(gain, detail=places)


def product_shares(ranks: Sequence[Times], label: str, rounds: int) -> Iterator[Finding]:
    """Return the shares of a product alone and of the time without waiting, and what a divided product takes."""
    product, both, work = (
        statistics.median(chain.from_iterable(getattr(rank, name) for rank in ranks))
        for name in ("product", "both", "work")
    )
    yield _finding(f"{label}, product / both", [(product, both)], rounds)
    yield _finding(f"{label}, without waiting / both", [(work, both)], rounds)
    for kind in ranks[0].divided:
        seconds = statistics.median(chain.from_iterable(rank.divided[kind] for rank in ranks))
        yield _finding(f"{label}, product {kind} / at once", [(seconds, product)], rounds)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finding(
    label: str,
    pairs: list[tuple[float, float]],
    rounds: int,
    most: float | None = None,
    bound: float | None = None,
) -> Finding:
    ours, theirs = (statistics.median(side) * 1e6 for side in zip(*pairs, strict=True))
    measured = statistics.median(first / second for first, second in pairs)
    detail = f"{ours:,.1f} over {theirs:,.1f} us, {rounds} rounds"
    print(f"{label}: {measured:.3g}", file=sys.stderr, flush=True)
    return Finding(label, measured, detail, most=most, bound=bound)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Finding]]] = {
    "kernels": kernels,
    "ranks": ranks,
    "products": products,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--rows", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    run = this_run()
    findings: list[Finding] = []
    with torch.inference_mode():
        for part in arguments.rows:
            findings += PARTS[part](arguments)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print_findings(findings)
    if arguments.json:
        rows: list[Any] = [{**asdict(each), "verdict": each.verdict} for each in findings]
        text = json.dumps({"machine": machine(), **run, "rows": rows}, indent=1)
        arguments.json.write_text(f"{text}\n", encoding="utf-8")
    raise SystemExit(any(each.verdict == "missed" for each in findings))


if __name__ == "__main__":
    main()
