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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from engine_rows import Finding, print_findings
from opgraft.base.text import printable
from serving_client import Client, Outcome
from serving_load import Load, Question, run
from serving_prompts import Prompt, arrivals, random_prompts
from serving_report import Limits, percentile, report
from serving_sides import (
    SETTINGS,
    WORDS,
    Cost,
    Served,
    Work,
    answer,
    offline,
    process_cpu,
    process_memory,
    serving,
    spans_taken,
    write_tiny,
)
from serving_soak import DRAIN, ENCODER_KINDS, KINDS, soaked
from timing import machine

STREAMS = 1000
RUNNING, WAITING = 16, 16
"""Sequences that may run, and wait, in the server that is overloaded."""

SHORT, LONG = Work(), Work(requests=16, tokens=2048)
"""The work of the comparisons: what is done anew for each token of an answer must not grow with the answer."""

SMALL_CACHE = {"cache.num_blocks": 256, "model.max_model_len": 1024}
SMALL_BATCHES = {"scheduler.max_num_batched_tokens": 512, "scheduler.max_num_seqs": 64}
"""Sizes that are soon used to the last byte: the system gives memory when it is first written, which is no leak."""

LONG_PROMPTS, LONG_WORDS = 3, 5_600
"""Prompts that take many steps of the engine, and their words, which are as many tokens."""

LENGTHS = 48, 80
"""Shortest and longest answers of the overload, in tokens."""

GOOD = 3.0
"""An answer is a good one up to so many times the median at the peak: as many wait as run, so 2 is what has to be."""

RECOVERED = 2.0
"""A server that has recovered answers within so many times the median when idle."""

IN_A_ROW = 3
"""Answers within it that tell that it has."""


def load(
    served: Served, prompts: Sequence[Prompt], load: Load, *, tokens: int = SHORT.tokens
) -> list[Outcome]:
    """Put a load on a server."""

    async def measure() -> list[Outcome]:
        async with Client(served.url) as client:
            question = Question(
                await client.model(), False, tokens, {"temperature": 0, "ignore_eos": True}
            )
            return await run(client, question, prompts, load)

    return asyncio.run(measure())


def staggered(number: int, seed: int) -> list[Prompt]:
    """Return prompts with answers of different lengths: of one length they would begin and end in step at the peak."""
    lengths = random.Random(seed)  # noqa: S311 - nothing secret
    prompts = random_prompts(number, WORDS, seed)
    return [replace(prompt, max_tokens=lengths.randint(*LENGTHS)) for prompt in prompts]


SETTLE = 6.0
"""Seconds in which a server makes and sends the spans of a round; OpenTelemetry sends each five seconds."""


def served_cost(served: Served, work: Work, seed: int, settle: float = 0.0) -> Cost:
    """Have a server answer the prompts of a seed, all at once.

    The CPU time includes that of so many seconds after the answers.
    """
    start, cpu = time.perf_counter(), process_cpu(served.pid)
    prompts = random_prompts(work.requests, WORDS, seed)
    outcomes = load(served, prompts, Load(concurrency=work.requests), tokens=work.tokens)
    if any(outcome.error or outcome.output_tokens != work.tokens for outcome in outcomes):
        raise SystemExit(f"a request to the server failed: {_failure(outcomes)}")
    seconds = time.perf_counter() - start
    time.sleep(settle)
    return Cost(seconds, process_cpu(served.pid) - cpu)


def both_costs(model: str, work: Work, rounds: int) -> list[tuple[Cost, Cost]]:
    """Return what server and engine took in each round; one more, at the start, warms up."""
    with serving(model, **work.settings) as served, offline(model, work) as process:
        return [
            (served_cost(served, work, seed), answer(process, seed)) for seed in range(rounds + 1)
        ][1:]


def throughput(folder: Path, arguments: argparse.Namespace) -> Finding:
    """Compare the throughput of the server with that of the engine."""
    del folder
    costs = both_costs(arguments.model, SHORT, arguments.rounds)
    clock = "cpu_seconds" if arguments.cpu_time else "seconds"
    ratios = [getattr(engine, clock) / getattr(server, clock) for server, engine in costs]
    detail = f"{SHORT.requests} requests of {SHORT.tokens} tokens, {clock}, {len(costs)} rounds, {arguments.model}"
    return Finding(
        "server over offline engine, throughput", statistics.median(ratios), detail, least=0.93
    )


def tracing(folder: Path, arguments: argparse.Namespace) -> Finding:
    """Compare the throughput of a server that sends spans of each step with that of one that sends none."""
    del folder
    settings = SHORT.settings
    with (
        spans_taken() as url,
        serving(arguments.model, **settings) as plain,
        serving(arguments.model, **settings, **{"server.otlp_endpoint": url}) as traced,
    ):
        # One more round, at the start, warms up.
        costs = [
            (served_cost(plain, SHORT, seed, SETTLE), served_cost(traced, SHORT, seed, SETTLE))
            for seed in range(arguments.rounds + 1)
        ][1:]
    clock = "cpu_seconds" if arguments.cpu_time else "seconds"
    ratios = [getattr(without, clock) / getattr(sent, clock) for without, sent in costs]
    detail = f"{SHORT.requests} requests of {SHORT.tokens} tokens, {clock}, {len(costs)} rounds, {arguments.model}"
    return Finding(
        "server with spans over without, throughput", statistics.median(ratios), detail, least=0.99
    )


def overhead(folder: Path, arguments: argparse.Namespace) -> list[Finding]:
    """Take the CPU time of the front end for a token, of short answers and of long ones."""
    model = write_tiny(folder)
    return [_overhead(model, work, arguments.rounds) for work in (SHORT, LONG)]


def _overhead(model: str, work: Work, rounds: int) -> Finding:
    costs = both_costs(model, work, rounds)
    tokens = work.requests * work.tokens
    values = [(server.cpu_seconds - engine.cpu_seconds) / tokens * 1e6 for server, engine in costs]
    engines = statistics.median(engine.cpu_seconds for _, engine in costs) / tokens * 1e6
    detail = (
        f"us of CPU time, {work.requests} requests; the engine's own {engines:.0f} us, "
        f"a tiny model, {rounds} rounds"
    )
    name = f"front end, us per token of {work.tokens:,}"
    return Finding(name, statistics.median(values), detail, most=120)


def streams(folder: Path, arguments: argparse.Namespace) -> list[Finding]:
    """Hold many streams open at once."""
    del arguments
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with serving(write_tiny(folder), **SHORT.settings | {"scheduler.max_num_seqs": 8}) as served:
        load(served, random_prompts(SHORT.requests, WORDS, 0), Load(concurrency=SHORT.requests))
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


def long_prompts(folder: Path, arguments: argparse.Namespace) -> Finding:
    """Ask for one token beside long prompts, and count the steps of the engine until it comes."""
    del folder
    with serving(arguments.model, **SETTINGS, **{"model.max_model_len": 6_000}) as served:
        steps, seconds = asyncio.run(_steps_beside_long_prompts(served))
    detail = (
        f"{seconds:.1f} s, beside {LONG_PROMPTS} prompts of {LONG_WORDS:,} words, {arguments.model}"
    )
    return Finding("short prompt beside long ones, steps to its token", steps, detail, most=3)


async def _steps_beside_long_prompts(served: Served) -> tuple[float, float]:
    """Return the steps that end between the sending of a short prompt and its token, and the seconds."""
    async with Client(served.url) as client:
        question = Question(await client.model(), False, 1, {"temperature": 0, "ignore_eos": True})
        prompts = random_prompts(LONG_PROMPTS, LONG_WORDS, 0)
        long = asyncio.create_task(run(client, question, prompts, Load(concurrency=LONG_PROMPTS)))
        while not (before := await asyncio.to_thread(served.metric, "engine_steps_total")):
            await asyncio.sleep(0.1)
        (short,) = await run(client, question, random_prompts(1, WORDS, 1), Load())
        after = await asyncio.to_thread(served.metric, "engine_steps_total")
        long.cancel()
    if short.error is not None:
        raise SystemExit(f"the short prompt failed: {_failure([short])}")
    return after - before, short.seconds


def overload(folder: Path, arguments: argparse.Namespace) -> list[Finding]:
    """Ask for twice what the server can bear, between two measurements of that: a machine may change meanwhile."""
    limits = {"scheduler.max_num_seqs": RUNNING, "server.max_waiting_requests": WAITING}
    with serving(write_tiny(folder), **SHORT.settings | limits) as served:
        alone = _median_seconds(load(served, staggered(9, 0), Load())[1:])
        before = load(served, staggered(16 * SHORT.requests, 0), Load(concurrency=RUNNING))
        twice = Load(rate=2 * report("peak", before, Limits()).goodput)
        found, running, seconds = asyncio.run(
            _overloaded(served, twice, arguments.seconds, RECOVERED * alone)
        )
        after = load(served, staggered(16 * SHORT.requests, 2), Load(concurrency=RUNNING))
    good = Limits(end_to_end=GOOD * _median_seconds([*before, *after]))
    peak = statistics.fmean(report("peak", busy, good).goodput for busy in (before, after))
    return [*bearing(found, good, peak, twice), *recovery(running, seconds, RECOVERED * alone)]


def bearing(found: list[Outcome], good: Limits, peak: float, twice: Load) -> list[Finding]:
    """Say how a server bore a load that is twice its peak."""
    borne = report(twice.label, found, good)
    refusals = sorted(outcome.seconds for outcome in found if outcome.error == "429")
    slowest = percentile(refusals, 99) * 1e3 if refusals else 0.0
    lost = sum(outcome.error not in (None, "429") for outcome in found)
    detail = f"{twice.label}, {len(refusals)} of {len(found)} refused"
    within = f"good answers take {good.end_to_end:.3f} s at most; at the peak {peak:.1f} of them a second"
    first = borne.time_to_first_token
    if first is not None:
        within += f"; the first token comes after {first.p50:.3f} s, p99 {first.p99:.3f} s"
    return [
        Finding(
            "goodput under twice the load, over peak",
            borne.goodput / peak,
            within,
            least=0.9,
        ),
        Finding("p99 of a refusal, ms", slowest, detail, most=50),
        Finding("requests that failed otherwise", lost, detail, most=0),
    ]


def recovery(running: float, seconds: float, limit: float) -> list[Finding]:
    """Say how a server recovered that was still busy when its load ended."""
    detail = f"until {IN_A_ROW} answers in a row came within {limit:.3f} s"
    return [
        Finding(
            "sequences that ran as the load ended",
            running,
            "with none there is nothing to recover from",
            least=1,
        ),
        Finding("recovery, s", seconds, detail, most=5),
    ]


async def _overloaded(
    served: Served, twice: Load, seconds: float, limit: float
) -> tuple[list[Outcome], float, float]:
    """Put a load on a server, and return what became of it, what ran as it ended, and the seconds of recovery."""
    async with Client(served.url) as client:
        question = Question(
            await client.model(), False, SHORT.tokens, {"temperature": 0, "ignore_eos": True}
        )
        prompts = staggered(max(2, int((twice.rate or 0) * seconds)), 1)
        loading = asyncio.create_task(run(client, question, prompts, twice))
        await asyncio.sleep(arrivals(len(prompts), twice.rate or 0, twice.poisson, twice.seed)[-1])
        running = await asyncio.to_thread(served.metric, "num_requests_running")

        async def ask() -> Outcome:
            return await client.send(question.path, question.body(prompts[0]), time.perf_counter())

        recovered = await until_recovered(ask, limit)
        return await loading, running, recovered


async def until_recovered(
    ask: Callable[[], Awaitable[Outcome]], limit: float, patience: float = 60
) -> float:
    """Return the seconds until answers come within a limit again; of a server on which they never do, ``patience``.

    A refusal is no answer, however fast it comes.
    """
    start, fast = time.perf_counter(), 0
    while fast < IN_A_ROW and time.perf_counter() < start + patience:
        outcome = await ask()
        fast = fast + 1 if outcome.error is None and outcome.seconds <= limit else 0
        await asyncio.sleep(0 if outcome.error is None else 0.02)
    return time.perf_counter() - start if fast == IN_A_ROW else patience


def _failure(outcomes: Sequence[Outcome]) -> str:
    """Name the first failure among outcomes, in the server's words."""
    for outcome in outcomes:
        if outcome.error is not None:
            return f"{outcome.error} {printable(outcome.message)}"
    return "an answer has the wrong number of tokens"


def _median_seconds(outcomes: list[Outcome]) -> float:
    if any(outcome.error is not None for outcome in outcomes):
        raise SystemExit(f"a server that was not overloaded failed: {_failure(outcomes)}")
    return statistics.median(outcome.seconds for outcome in outcomes)


def soak(folder: Path, arguments: argparse.Namespace) -> list[Finding]:
    """Ask a language model and an encoder for all sorts of things for a long time, and look at what is left behind."""
    settings = {"load.progress": False, "server.drain_seconds": DRAIN}
    decoding, encoding = (
        {**SHORT.settings, **settings, **SMALL_CACHE},
        {**settings, **SMALL_BATCHES},
    )
    with (
        serving(write_tiny(folder), **decoding) as decoder,
        serving("minilm", **encoding) as encoder,
    ):
        servers = [("language model", decoder, KINDS), ("encoder", encoder, ENCODER_KINDS)]
        return list(soaked(servers, arguments.minutes))


PARTS: dict[str, Callable[[Path, argparse.Namespace], Finding | list[Finding]]] = {
    "throughput": throughput,
    "tracing": tracing,
    "overhead": overhead,
    "streams": streams,
    "long_prompts": long_prompts,
    "overload": overload,
    "soak": soak,
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="opgraft serve: what the server costs, and how it bears load."
    )
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument(
        "--rows", nargs="*", choices=PARTS, default=[part for part in PARTS if part != "soak"]
    )
    parser.add_argument("--model", default="smollm2", help="of the throughput")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="compare CPU time, where other work runs beside this",
    )
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
        arguments.json.write_text(
            json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    raise SystemExit(any(each.verdict == "missed" for each in findings))


if __name__ == "__main__":
    main()
