"""Counters and timings of the engine: what its steps computed, and where their time went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from time import perf_counter
from typing import TypeVar, get_args

from opgraft.engine.request import FinishReason

PARTS = ("schedule", "inputs", "model", "sample", "text")
"""Parts of a step that are timed, in their order. Text is the front's, where the engine has one."""

FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)

_Number = TypeVar("_Number", int, float)


def _no_time() -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0)


def _none_finished() -> dict[str, int]:
    return dict.fromkeys(FINISH_REASONS, 0)


@dataclass(slots=True)
class Counters:
    """Totals since the engine was made, which the parts of the engine add to as they go.

    Attributes:
        steps: that were computed, failed ones included. Of an encoder, batches.
        failed_steps: of these, those in which something was raised.
        prompt_tokens: computed of prompts, and anew of sequences that had given their blocks away.
            Of an encoder, of texts.
        decode_tokens: computed of outputs, one for each sequence and step.
        sampled_tokens: that came out.
        prefix_queries: tokens of the sequences that were admitted.
        prefix_hits: of these, those whose keys and values were found in the cache.
        preemptions: sequences that gave their blocks to others.
        finished: requests that have ended, by ``finish_reason``. Of an encoder, texts, by "stop" or
            "error".
        seconds: by part of the step. Host time: where a device computes behind the host's back,
            what it takes is counted where the host waits for it, which is "sample".
    """

    steps: int = 0
    failed_steps: int = 0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    sampled_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=_none_finished)
    seconds: dict[str, float] = field(default_factory=_no_time)

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Add times by part of the step; those of parts that are not in ``PARTS`` are not counted."""
        for part in PARTS:
            self.seconds[part] += seconds.get(part, 0.0)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of a block to a part of the step, whether it raises or not."""
        started = perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += perf_counter() - started


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """State and counters of an engine at a moment: totals since it was made, or changes ``since`` another moment.

    Attributes:
        running: requests that hold blocks of the cache; each of several completions counts as one.
            Of an encoder, the texts of the batch that is computed.
        waiting: requests that hold none. Of an encoder, the texts of later batches.
        blocks_used: blocks of the cache that a request holds.
        num_blocks: blocks of the cache.
        counters: totals, or changes.
        replica: the number of the engine among replicas; 0 for one that is alone, and for the sum
            of several.
    """

    running: int
    waiting: int
    blocks_used: int
    num_blocks: int
    counters: Counters
    replica: int = 0

    @property
    def cache_usage(self) -> float:
        """Return the share of the cache's blocks that are used, 0 to 1; 0 without a cache, as in an encoder."""
        return self.blocks_used / self.num_blocks if self.num_blocks else 0.0

    def since(self, earlier: EngineStats) -> EngineStats:
        """Return the state of now, with the changes of the counters from an ``earlier`` moment."""
        return EngineStats(
            running=self.running,
            waiting=self.waiting,
            blocks_used=self.blocks_used,
            num_blocks=self.num_blocks,
            counters=_difference(self.counters, earlier.counters),
            replica=self.replica,
        )


def summed(stats: Sequence[EngineStats]) -> EngineStats:
    """Return what several engines do and have done together."""
    return EngineStats(
        running=sum(each.running for each in stats),
        waiting=sum(each.waiting for each in stats),
        blocks_used=sum(each.blocks_used for each in stats),
        num_blocks=sum(each.num_blocks for each in stats),
        counters=reduce(_sum, (each.counters for each in stats)),
    )


def _sum(first: Counters, second: Counters) -> Counters:
    return _difference(first, _difference(_ZERO, second))


def copied(counters: Counters) -> Counters:
    """Return counters that stay as these are now."""
    return _difference(counters, _ZERO)


def _difference(now: Counters, before: Counters) -> Counters:
    return Counters(
        now.steps - before.steps,
        now.failed_steps - before.failed_steps,
        now.prompt_tokens - before.prompt_tokens,
        now.decode_tokens - before.decode_tokens,
        now.sampled_tokens - before.sampled_tokens,
        now.prefix_queries - before.prefix_queries,
        now.prefix_hits - before.prefix_hits,
        now.preemptions - before.preemptions,
        _subtracted(now.finished, before.finished),
        _subtracted(now.seconds, before.seconds),
    )


def _subtracted(now: Mapping[str, _Number], before: Mapping[str, _Number]) -> dict[str, _Number]:
    return {name: value - before[name] for name, value in now.items()}


_ZERO = Counters()
