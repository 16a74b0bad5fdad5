"""The gain of several ranks, and the cost of talking to each other: processes of one thread each on one host.

Two ranks share the layers of a model (``parallel.tensor``) and answer the same requests as one, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_rows import Finding, print_findings
from parallel_broadcast import PARTS as OF_PROCESSES
from parallel_data import data
from parallel_pipeline import pipeline
from parallel_plan import plan
from parallel_ranks import Decoded, Ranks, decode, load, prefer, read, reduce
from timing import machine

TOKENS = 40
"""Of an answer."""

BATCHES = {8: 1.5, 1: None}
"""Requests at once, and the least that two ranks are to gain."""

SIZES = (4, 2304, 2**14, 2**18, 2**21, 2**24)
"""Bytes of the sums; the second is a row of SmolLM2's hidden states."""


def tensor(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare the throughput of two ranks with that of one; say what is possible, and what their collectives take."""
    for dtype in arguments.dtypes:
        with Ranks(1) as one, Ranks(2) as two:
            (whole,), parts = (
                one.run(load, arguments.model, dtype),
                two.run(load, arguments.model, dtype),
            )
            alone_reads, both_read = (
                sum(_prefer(ranks, read, whole.weights, 5)) for ranks in (one, two)
            )
            largest = max(part.weights for part in parts)
            for batch, least in BATCHES.items():
                alone, shared = _in_turns(one, two, batch, arguments.rounds)
                seconds = statistics.median(rank.seconds for (rank,) in alone)
                bound = possible_gain(whole.weights, largest, both_read, seconds)
                yield from _gain(f"{dtype}, batch {batch}", alone, shared, least, bound)
        detail = f"{both_read / 1e9:.1f} over {alone_reads / 1e9:.1f} GB/s"
        yield Finding(
            f"bytes that two read at once over one, {dtype}", both_read / alone_reads, detail
        )
        weights, heads = (
            [f"{getattr(part, name):,}" for part in parts] for name in ("weights", "key_heads")
        )
        detail = f"{' and '.join(weights)} of {whole.weights:,} bytes; {' and '.join(heads)} of the key heads"
        yield Finding(
            f"largest rank's weights over all, {dtype}", largest / whole.weights, detail, most=0.55
        )


def possible_gain(weights: int, largest: int, both_read: float, seconds: float) -> float:
    """Return the most that two ranks can gain: one computes its part, and both read all weights.

    Args:
        weights: bytes of all.
        largest: bytes of the larger part.
        both_read: bytes per second, by both at once.
        seconds: of a step of one rank that has all.
    """
    return 1 / max(largest / weights, weights / both_read / seconds)


def _prefer(ranks: Ranks, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Have ranks call a function before other processes."""
    ranks.run(prefer, -20)
    found = ranks.run(function, *arguments)
    ranks.run(prefer, 0)
    return found


def _in_turns(
    one: Ranks, two: Ranks, batch: int, rounds: int
) -> tuple[list[list[Decoded]], list[list[Decoded]]]:
    """Have both answer in each round; one round more, at the start, warms up."""
    found: tuple[list[list[Decoded]], list[list[Decoded]]] = ([], [])
    for number in range(rounds + 1):
        for ranks, decoded in list(zip((one, two), found, strict=True))[:: 1 if number % 2 else -1]:
            decoded.append(_prefer(ranks, decode, batch, TOKENS))
    return found[0][1:], found[1][1:]


def _gain(
    name: str,
    alone: list[list[Decoded]],
    shared: list[list[Decoded]],
    least: float | None,
    bound: float,
) -> Iterator[Finding]:
    pairs = [
        (a[0].seconds, max(rank.seconds for rank in s)) for a, s in zip(alone, shared, strict=True)
    ]
    one, two = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    detail = f"{two:.2f} over {one:.2f} ms a step, {len(pairs)} rounds"
    gain = statistics.median(a / s for a, s in pairs)
    yield Finding(f"two ranks over one, {name}", gain, detail, least=least, bound=bound)
    own = [max(rank.own for rank in each) for each in shared]
    gain = statistics.median(a / rest for (a, _), rest in zip(pairs, own, strict=True))
    detail = f"{statistics.median(own) * 1e3:.2f} ms of the slower rank, which tells of it where other work runs beside"
    yield Finding(f"without collectives, {name}", gain, detail)
    # The rank that waits least has the time of the collectives themselves.
    least_waiting = [min(each, key=lambda rank: rank.taken) for each in shared]
    taken, waited = (
        statistics.median(getattr(rank, of) for rank in least_waiting) * 1e6
        for of in ("taken", "waited")
    )
    calls, given = shared[0][0].calls, shared[0][0].given
    detail = f"{calls:.0f} of {given / 1e3:,.0f} kB in all, by the rank that waits least, {waited:.0f} us"
    yield Finding(f"us in collectives, {name}", taken, detail)


def sums(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare the time of a sum over two ranks with that of torch.distributed."""
    with Ranks(2) as two:
        two.run(prefer, -20)
        for size in SIZES:
            ours, theirs = two.run(reduce, size, 4 * arguments.rounds)[0]
            detail = f"{ours * 1e6:,.1f} over {theirs * 1e6:,.1f} us"
            yield Finding(
                f"sum of {size:,} bytes over torch.distributed's", ours / theirs, detail, most=1.0
            )


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Finding]]] = {
    "tensor": tensor,
    "sums": sums,
    "data": data,
    "pipeline": pipeline,
    "plan": plan,
    **OF_PROCESSES,
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What several ranks on one host gain, and what they cost."
    )
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--rows", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    arguments, findings = parsed(), list[Finding]()
    for part in arguments.rows:
        findings += PARTS[part](arguments)
        print(f"measured: {part}", file=sys.stderr)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print_findings(findings)
    if arguments.json:
        rows: Sequence[object] = [{**asdict(each), "verdict": each.verdict} for each in findings]
        arguments.json.write_text(
            json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    raise SystemExit(any(each.verdict == "missed" for each in findings))


if __name__ == "__main__":
    main()
