"""``opgraft serve`` against the same engine without a server, and under more load than it can bear.

Both sides answer the same prompts in turns. What the front end costs a token is taken with a model whose steps take
next to no time, as CPU time of the server's process over that of the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_rows import Finding, print_findings
from opgraft.bench.client import Client, Outcome
from opgraft.bench.load import Load, Question, run
from opgraft.bench.prompts import random_prompts
from opgraft.bench.report import percentile
from serving_sides import (
    REQUESTS,
    TOKENS,
    WORDS,
    Cost,
    Served,
    answer,
    offline,
    process_cpu,
    process_memory,
    serving,
    write_tiny,
)
from timing import machine

STREAMS = 1000
WAITING = 16
"""Sequences that may wait in the server that is overloaded."""

SMALL_CACHE = {"cache.num_blocks": 256}
"""A cache that is soon used to its last block: the system gives memory when it is first written, which is no leak."""

RECOVERED = 2.0
"""An answer that takes so many times as long as of an idle server is of one that has recovered."""


def load(served: Served, prompts: int, load: Load, *, tokens: int = TOKENS, seed: int = 0) -> list[Outcome]:
    """Put a load on a server."""

    async def measure() -> list[Outcome]:
        async with Client(served.url) as client:
            question = Question(await client.model(), False, tokens, {"temperature": 0, "ignore_eos": True})
            return await run(client, question, random_prompts(prompts, WORDS, seed), load)

    return asyncio.run(measure())


def served_cost(served: Served, seed: int) -> Cost:
    """Have a server answer the prompts of a seed, all at once."""
    start, cpu = time.perf_counter(), process_cpu(served.pid)
    outcomes = load(served, REQUESTS, Load(concurrency=REQUESTS), seed=seed)
    if any(outcome.error or outcome.output_tokens != TOKENS for outcome in outcomes):
        raise SystemExit("a request to the server failed: run 'opgraft bench serve' to see how")
    return Cost(time.perf_counter() - start, process_cpu(served.pid) - cpu)


def both_costs(model: str, rounds: int) -> list[tuple[Cost, Cost]]:
    """Return what server and engine took in each round; one more, at the start, warms up."""
    with serving(model) as served, offline(model) as process:
        return [(served_cost(served, seed), answer(process, seed)) for seed in range(rounds + 1)][1:]


def throughput(folder: Path, arguments: argparse.Namespace) -> Finding:
    """Compare the throughput of the server with that of the engine."""
    del folder
    costs = both_costs(arguments.model, arguments.rounds)
    clock = "cpu_seconds" if arguments.cpu_time else "seconds"
    ratios = [getattr(engine, clock) / getattr(server, clock) for server, engine in costs]
    detail = f"{REQUESTS} requests of {TOKENS} tokens, {clock}, {len(costs)} rounds, {arguments.model}"
    return Finding("server over offline engine, throughput", statistics.median(ratios), detail, least=0.93)


def overhead(folder: Path, arguments: argparse.Namespace) -> Finding:
    """Take the CPU time of the front end for a token."""
    costs = both_costs(write_tiny(folder), arguments.rounds)
    tokens = REQUESTS * TOKENS
    values = [(server.cpu_seconds - engine.cpu_seconds) / tokens * 1e6 for server, engine in costs]
    engines = statistics.median(engine.cpu_seconds for _, engine in costs) / tokens * 1e6
    detail = f"us of CPU time; the engine's own {engines:.0f} us, a tiny model, {len(costs)} rounds"
    return Finding("front end, us per token", statistics.median(values), detail, most=120)


def streams(folder: Path, arguments: argparse.Namespace) -> list[Finding]:
    """Hold many streams open at once."""
    del arguments
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with serving(write_tiny(folder), **{"scheduler.max_num_seqs": 8}) as served:
        load(served, REQUESTS, Load(concurrency=REQUESTS))
        before = process_memory(served.pid)
        held = asyncio.run(_most_memory(served))
    per_stream = (held[0] - before) / STREAMS / 1e3
    lost = sum(outcome.error is not None for outcome in held[1])
    detail = f"{STREAMS} streams at once, 8 of them running"
    return [
        Finding("streams lost", lost, detail, most=0),
        Finding("memory of a stream, kB", per_stream, detail, most=200),
    ]


async def _most_memory(served: Served) -> tuple[int, list[Outcome]]:
    """Open the streams, and return the most memory that the server held, and what became of them."""
    async with Client(served.url) as client:
        question = Question(await client.model(), False, 16, {"temperature": 0, "ignore_eos": True})
        running = asyncio.create_task(
            run(client, question, random_prompts(STREAMS, WORDS, 1), Load(concurrency=STREAMS))
        )
        most = 0
        while not running.done():
            most = max(most, process_memory(served.pid))
            await asyncio.sleep(0.02)
        return most, await running


def overload(folder: Path, arguments: argparse.Namespace) -> list[Finding]:
    """Ask for twice what the server can bear."""
    limits = {"scheduler.max_num_seqs": 16, "server.max_waiting_requests": WAITING}
    with serving(write_tiny(folder), **limits) as served:
        alone = max(outcome.seconds for outcome in load(served, 8, Load())[1:])
        peak = _rate(load(served, 16 * REQUESTS, Load(concurrency=16)))
        twice = Load(rate=2 * peak)
        found = load(served, int(twice.rate * arguments.seconds) if twice.rate else 0, twice, seed=1)
        ended = time.perf_counter()
        while load(served, 1, Load())[0].seconds > RECOVERED * alone and time.perf_counter() < ended + 60:
            pass
        recovery = time.perf_counter() - ended
    refusals = sorted(outcome.seconds for outcome in found if outcome.error == "429")
    lost = sum(outcome.error not in (None, "429") for outcome in found)
    detail = f"{2 * peak:.0f} requests/s for {arguments.seconds:g} s, {len(refusals)} of {len(found)} refused"
    slowest = percentile(refusals, 99) * 1e3 if refusals else 0.0
    return [
        Finding("goodput under twice the load, over peak", _rate(found) / peak, detail, least=0.9),
        Finding("p99 of a refusal, ms", slowest, detail, most=50),
        Finding("requests that failed otherwise", lost, detail, most=0),
        Finding("recovery, s", recovery, f"until an answer takes less than {RECOVERED:g} times {alone:.3f} s", most=5),
    ]


def _rate(outcomes: Sequence[Outcome]) -> float:
    done = [outcome for outcome in outcomes if outcome.error is None]
    return len(done) / (max(each.ended for each in outcomes) - min(each.due for each in outcomes))


def soak(folder: Path, arguments: argparse.Namespace) -> list[Finding]:
    """Ask a server for all sorts of things for a long time, and look at what is left behind."""
    with serving(write_tiny(folder), **SMALL_CACHE) as served:
        asyncio.run(_mixed(served, max(20, arguments.minutes * 6)))  # until allocators have reached their size
        before = process_memory(served.pid)
        hung, asked = asyncio.run(_mixed(served, arguments.minutes * 54))
        time.sleep(1)
        grown = process_memory(served.pid) / before - 1
        left = served.metric("kv_cache_usage_perc") + served.metric("num_requests_running")
    detail = f"{asked} requests in {arguments.minutes:g} minutes"
    return [
        Finding("hung requests", hung, detail, most=0),
        Finding("blocks and requests left", left, detail, most=0),
        Finding("growth of memory", grown, detail, most=0.05),
    ]


async def _mixed(served: Served, seconds: float) -> tuple[int, int]:
    """Ask for answers, bad ones too, and leave early, eight at a time; return requests that hung, and all."""
    until, counts = time.perf_counter() + seconds, {"hung": 0, "asked": 0}
    async with Client(served.url, seconds=60) as client:
        name = await client.model()

        async def worker(seed: int) -> None:
            source = random.Random(seed)  # noqa: S311 - nothing secret
            while time.perf_counter() < until:
                counts["asked"] += 1
                question = Question(name, False, source.randrange(1, 100), source.choice(_FIELDS))
                body = question.body(random_prompts(1, source.randrange(1, 150), source.randrange(10**9))[0])
                sending = client.send(question.path, body, time.perf_counter())
                try:
                    patience = source.choice((0.01, 0.05, 90, 90))
                    counts["hung"] += (await asyncio.wait_for(sending, patience)).error == "timeout"
                except asyncio.TimeoutError:  # a client that has left
                    counts["hung"] += patience > 60

        await asyncio.gather(*map(worker, range(8)))
    return counts["hung"], counts["asked"]


_FIELDS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True},
    {"n": 3, "temperature": 1.0},
    {"stop": ["e"]},
    {"logprobs": 3},
    {"prompt": ["one", "two"]},
    {"temperature": -1},
    {"max_tokens": 10**9},
    {"unknown": 1},
    {"prompt": [10**6]},
)
"""What requests ask for besides; the last four are refused."""

PARTS: dict[str, Callable[[Path, argparse.Namespace], Finding | list[Finding]]] = {
    "throughput": throughput,
    "overhead": overhead,
    "streams": streams,
    "overload": overload,
    "soak": soak,
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="opgraft serve: what the server costs, and how it bears load.")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--rows", nargs="*", choices=PARTS, default=[part for part in PARTS if part != "soak"])
    parser.add_argument("--model", default="smollm2", help="of the throughput")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU time, where other work runs beside this")
    parser.add_argument("--seconds", type=float, default=60, help="of the overload")
    parser.add_argument("--minutes", type=float, default=20, help="of the soak")
    return parser.parse_args()


def main() -> None:
    arguments, findings = parsed(), list[Finding]()
    for part in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[part](Path(folder), arguments)
        findings += found if isinstance(found, list) else [found]
        print(f"measured: {part}", file=sys.stderr)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print_findings(findings)
    if arguments.json:
        rows = [{**asdict(each), "verdict": each.verdict} for each in findings]
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(any(each.verdict == "missed" for each in findings))


if __name__ == "__main__":
    main()
