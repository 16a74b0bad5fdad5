"""The first token of short requests beside a long prompt: in one process, and with a second one for the prompt.

In each round, a chat streams its answer, a new long prompt arrives, and short requests follow while it is computed. All
tokens and log-probabilities must have the same bits in both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from timing import machine

MOST = 0.5
"""The fine ratio of the first tokens of short requests."""

LEAST = 512
SHORTS, LENGTH, GAP = 6, 32, 0.15
"""Short requests of a round, their tokens, and the seconds between two of them."""

SETTINGS: dict[str, Any] = {
    "model.batch_invariant": True,
    "model.max_model_len": 8192,
    "cache.num_blocks": 600,
    "load.progress": False,
}


class Answered:
    """The seconds until the first token of an answer, and between later ones; the tokens with their logprobs."""

    def __init__(self) -> None:
        self.first = 0.0
        self.gaps: list[float] = []
        self.bits: Any = None


async def answered(llm: Any, length: int, seed: int, tokens: int) -> Answered:
    from opgraft import SamplingParams

    prompt = random.Random(seed).choices(range(100, 40_000), k=length)  # noqa: S311
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    found = Answered()
    last = time.perf_counter()
    async for output in llm.generate(prompt, params):
        now = time.perf_counter()
        if found.bits is None:
            found.first = now - last
        else:
            found.gaps.append(now - last)
        last = now
        found.bits = (list(output.outputs[0].token_ids), list(output.outputs[0].logprobs))
    return found


async def rounds_of(llm: Any, length: int, rounds: int) -> list[dict[str, Any]]:
    # The first answers make what later ones use.
    await answered(llm, 40, 9001, 4)
    await answered(llm, length, 9002, 4)
    rows = []
    for number in range(rounds):
        chat = asyncio.create_task(answered(llm, 20, 9003, 80))
        await asyncio.sleep(0.1)
        long = asyncio.create_task(answered(llm, length, number, 4))
        await asyncio.sleep(0.05)
        shorts = []
        for short in range(SHORTS):
            seed = 1000 + number * SHORTS + short
            shorts.append(asyncio.create_task(answered(llm, LENGTH, seed, 4)))
            await asyncio.sleep(GAP)
        each = await asyncio.gather(*shorts)
        of_chat, of_long = await chat, await long
        rows.append(
            {
                "short": [one.first for one in each],
                "chat": of_chat.gaps,
                "long": of_long.first,
                "bits": [one.bits for one in (*each, of_chat, of_long)],
            }
        )
    return rows


def measured(
    name: str, dtype: str, length: int, rounds: int, **settings: Any
) -> tuple[dict[str, float], Any]:
    """Return the figures of an engine, and the tokens and log-probabilities."""
    from opgraft.serving.async_llm import AsyncLLM

    llm = AsyncLLM(name, dtype=dtype, **SETTINGS, **settings)
    try:
        rows = asyncio.run(rounds_of(llm, length, rounds))
        outcomes = llm.stats().counters.handovers
    finally:
        llm.shutdown()
    # The long prompt that comes first is one of them.
    if settings and outcomes["computed"] != rounds + 1:
        raise RuntimeError(f"the second process has not computed all prompts: {outcomes}")
    short = [seconds for row in rows for seconds in row["short"]]
    chat = [seconds for row in rows for seconds in row["chat"]]
    figures = {
        "short": statistics.median(short),
        "slowest_short": max(short),
        "chat": statistics.median(chat),
        "slowest_chat": max(chat),
        "long": statistics.median(row["long"] for row in rows),
    }
    return figures, [row["bits"] for row in rows]


def compared(name: str, dtype: str, length: int, rounds: int) -> dict[str, Any]:
    alone, expected = measured(name, dtype, length, rounds)
    handed, found = measured(name, dtype, length, rounds, **{"handover.tokens": LEAST})
    if found != expected:
        raise RuntimeError(f"{dtype}: an answer has other bits with a second process")
    return {
        "dtype": dtype,
        "tokens": length,
        "rounds": rounds,
        "one_process": alone,
        "two_processes": handed,
        "ratio": handed["short"] / alone["short"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a second process for long prompts gains.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    given = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    rows = []
    for dtype in given.dtypes:
        row = compared(given.model, dtype, given.tokens, given.rounds)
        rows.append(row)
        print(f"{dtype}, beside {given.tokens} tokens, seconds in one process and in two:")
        for figure, seconds in row["one_process"].items():
            print(f"  {figure:14} {seconds:.4f} {row['two_processes'][figure]:.4f}")
        print(
            f"  ratio of the first tokens of short requests: {row['ratio']:.3f} (wanted {MOST:g})"
        )
    if given.json:
        text = json.dumps({"machine": machine(), "rows": rows}, indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")
    raise SystemExit(any(row["ratio"] > MOST for row in rows))


if __name__ == "__main__":
    main()
