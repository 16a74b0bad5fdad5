"""The gain of the stages of a pipeline that compute at the same time: two processes of one thread each on one host.

The same engine answers the same requests with as many steps at a time as it has stages, and with one, in turns; beside
it one process that has all layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from engine_rows import Finding
from opgraft.config import (
    CacheConfig,
    LoadConfig,
    ModelConfig,
    OpgraftConfig,
    ParallelConfig,
    SchedulerConfig,
)
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams

STAGES = 2
REQUESTS = 16
"""At once."""

LOADS = {"prompts": (128, 1, 1.3), "answers": (8, 40, None)}
"""Loads by name → tokens of each prompt and of each answer, and the least gain by computing at the same time.

Stages that read weights for few rows each wait for the same memory here, so what answers gain is that of the machine.
"""


def pipeline(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Compare the throughput of two stages with several steps at a time, with one, and of one process."""
    for dtype in arguments.dtypes:
        one = EngineCore(_settings(arguments.model, dtype, ParallelConfig(executor="in_process")))
        two = EngineCore(_settings(arguments.model, dtype, ParallelConfig(pipeline=STAGES)))
        for name, load in LOADS.items():
            found = [_round(one, two, *load[:2]) for _ in range(arguments.rounds + 1)][1:]
            yield from _gain(f"{name}, {dtype}", found, load[2])
        one.shutdown()
        two.shutdown()


def _round(
    one: EngineCore, two: EngineCore, prompt: int, answer: int
) -> tuple[float, float, float]:
    """Return the tokens per second of one process, of stages in turn, and of stages at the same time."""
    rates = [_rate(one, prompt, answer)]
    for depth in (1, STAGES):
        with _depth(two, depth):
            rates.append(_rate(two, prompt, answer))
    return rates[0], rates[1], rates[2]


def _gain(
    name: str, found: list[tuple[float, float, float]], least: float | None
) -> Iterator[Finding]:
    alone, in_turn, beside = (statistics.median(side) for side in zip(*found, strict=True))
    gain, over = (statistics.median(each[2] / each[side] for each in found) for side in (1, 0))
    detail = f"{beside:.0f} over {in_turn:.0f} tokens/s, {len(found)} rounds"
    yield Finding(f"two steps at a time over one, {name}", gain, detail, least=least)
    yield Finding(
        f"two stages over one process, {name}", over, f"{beside:.0f} over {alone:.0f} tokens/s"
    )


def _settings(model: str, dtype: str, parallel: ParallelConfig) -> OpgraftConfig:
    return OpgraftConfig(
        model=ModelConfig(name=model, dtype=dtype, max_model_len=512),
        cache=CacheConfig(num_blocks=256, prefix_reuse=False),
        scheduler=SchedulerConfig(max_num_seqs=REQUESTS, max_num_batched_tokens=256),
        load=LoadConfig(progress=False),
        parallel=parallel,
    )


@contextmanager
def _depth(core: EngineCore, depth: int) -> Iterator[None]:
    before = core.scheduler.depth
    core.scheduler.depth = depth
    kind: Any = type(core.executor)
    with patch.object(kind, "depth", depth):
        yield
    core.scheduler.depth = before


def _rate(core: EngineCore, prompt: int, answer: int) -> float:
    """Return the tokens per second that are computed of requests that come at once."""
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    drawn = torch.randint(1000, 40000, (REQUESTS, prompt)).tolist()
    start = time.perf_counter()
    core.add([Request(str(number), tokens, params) for number, tokens in enumerate(drawn)])
    while core.has_work:
        core.step()
    return REQUESTS * (prompt + answer - 1) / (time.perf_counter() - start)
