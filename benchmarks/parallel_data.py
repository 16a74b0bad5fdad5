"""The gain of two replicas over one engine, and of the router's memory of prompts over the load alone."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from engine_rows import Finding
from opgraft import LLM, SamplingParams
from opgraft.serving.replicas import RequestRouter

REQUESTS, TOKENS = 32, 24
"""At once, of both replicas together, and of an answer."""

SESSIONS, TURNS, TURN_TOKENS = 12, 5, 48
"""Chats, their turns, and the tokens that a user adds in each."""


def data(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare throughput and hit rate; each engine has a process and a thread of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    given: dict[str, Any] = {
        "parallel.executor": "processes",
        "max_model_len": 1024,
        "max_num_seqs": 8,
    }
    given |= {"cache.num_blocks": 1024, "load.progress": False, "dtype": arguments.dtypes[0]}
    with (
        LLM(arguments.model, **given) as one,
        LLM(arguments.model, **given, data_parallel_size=2) as two,
    ):
        pairs = [
            (_speed(one, number), _speed(two, number)) for number in range(arguments.rounds + 1)
        ][1:]
        alone, both = (statistics.median(side) for side in zip(*pairs, strict=True))
        detail = f"{both:.0f} over {alone:.0f} tokens a second, {REQUESTS} requests, {arguments.dtypes[0]}"
        yield Finding(
            "two replicas over one", statistics.median(b / a for a, b in pairs), detail, least=1.5
        )
        knowing = _hit_rate(two, seed=1)
        two.replicas.router = RequestRouter([0, 0])  # which remembers nothing
        plain = _hit_rate(two, seed=2)
        detail = (
            f"{knowing:.3f} over {plain:.3f} of prompts' tokens, {SESSIONS} chats of {TURNS} turns"
        )
        yield Finding("hits by prefix over least loaded", knowing / plain, detail, least=1.1)


def _speed(llm: LLM, number: int) -> float:
    """Return the tokens a second of requests that share nothing with those before."""
    draw = random.Random(number)  # noqa: S311 - no secret
    prompts = [[draw.randrange(1000, 20000) for _ in range(16)] for _ in range(REQUESTS)]
    started = time.perf_counter()
    llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True), progress=False
    )
    return REQUESTS * TOKENS / (time.perf_counter() - started)


def _hit_rate(llm: LLM, seed: int) -> float:
    """Return the share of tokens of chats' prompts that the caches have, a part of the chats at a time."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    chats: list[list[int]] = [[] for _ in range(SESSIONS)]
    before = llm.stats()
    for _ in range(TURNS * 2):
        asked = draw.sample(range(SESSIONS), SESSIONS // 2)
        for number in asked:
            chats[number] += [draw.randrange(1000, 20000) for _ in range(TURN_TOKENS)]
        answers = llm.generate([chats[number] for number in asked], params, progress=False)
        for number, answer in zip(asked, answers, strict=True):
            chats[number] += answer.outputs[0].token_ids
    counted = llm.stats().since(before).counters
    return counted.prefix_hits / counted.prefix_queries
