"""Counters and timings of the engine's steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from time import perf_counter
from typing import TypeVar, get_args

from opgraft.engine.request import FinishReason

PARTS = ("schedule", "inputs", "model", "sample", "text")
"""The timed parts of a step, in their order. Text is the front end's, if the engine has one."""

FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)

HANDOVERS = ("computed", "late", "failed", "not_stored", "unavailable", "prompt_logprobs", "lora")
"""The outcomes of prompts that are long enough for the second process (``handover.tokens``).

All but the first were computed by the engine, as a whole or in part: the second process was late,
failed or was lost before, blocks were not found, or the request asked for log-probabilities of the
prompt or for an adapter.
"""

_Key = TypeVar("_Key", bound=Hashable)
_Number = TypeVar("_Number", int, float)


def _no_time() -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0)


def _none_finished() -> dict[str, int]:
    return dict.fromkeys(FINISH_REASONS, 0)


def _none_handed_over() -> dict[str, int]:
    return dict.fromkeys(HANDOVERS, 0)


@dataclass(slots=True)
class Counters:
    """Totals since the engine was made. Each part of the engine adds its own.

    An encoder counts batches as steps, and texts as requests.

    Attributes:
        steps: computed steps, failed ones included.
        failed_steps: steps with an error.
        prompt_tokens: computed tokens of prompts, and tokens computed anew after a preemption.
        decode_tokens: computed tokens of outputs, one for each sequence and step, and drafts,
            rejected ones too.
        sampled_tokens: tokens from the sampler. With drafts, some may lie behind a stop string.
        prefix_queries: tokens of admitted sequences.
        prefix_hits: the part of these tokens with keys and values in the cache.
        restored_tokens: tokens of blocks that were read from ``cache.store``.
        preemptions: sequences that gave their blocks to others.
        drafts: drafts that steps have computed, one for each sequence and step.
        draft_tokens: tokens of these drafts.
        accepted_tokens: the part of these tokens that the sampler has chosen, too. Some may lie behind
            a stop string.
        handovers: long prompts by an entry of ``HANDOVERS``.
        finished: ended requests by ``finish_reason``. An encoder has "stop" and "error" only.
        seconds: host time by part of the step. A device may compute while the host goes on. The
            time of the device then counts under "sample", because the host waits there.
        op_seconds: host time by op, kernel and provider, of the steps that were chosen for this
            (``server.time_ops_every``).
    """

    steps: int = 0
    failed_steps: int = 0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    sampled_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    restored_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    handovers: dict[str, int] = field(default_factory=_none_handed_over)
    finished: dict[str, int] = field(default_factory=_none_finished)
    seconds: dict[str, float] = field(default_factory=_no_time)
    op_seconds: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Add times by part of the step. Parts that are not in ``PARTS`` do not count."""
        for part in PARTS:
            self.seconds[part] += seconds.get(part, 0.0)

    def add_op_seconds(self, seconds: Mapping[tuple[str, str, str], float]) -> None:
        """Add times by op, kernel and provider."""
        for called, spent in seconds.items():
            self.op_seconds[called] = self.op_seconds.get(called, 0.0) + spent

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of a ``with`` block to a part of the step, even if the block raises."""
        started = perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += perf_counter() - started


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """State and counters of an engine: totals, or changes ``since`` an earlier moment.

    Attributes:
        running: requests with blocks of the cache; each of several completions counts as one. For
            an encoder, texts of the batch under way.
        waiting: requests without blocks. For an encoder, texts of later batches.
        blocks_used: blocks of the cache that requests hold.
        num_blocks: blocks of the cache.
        counters: totals, or changes.
        replica: number of the engine among replicas; 0 for a single engine, and for a sum.
    """

    running: int
    waiting: int
    blocks_used: int
    num_blocks: int
    counters: Counters
    replica: int = 0

    @property
    def cache_usage(self) -> float:
        """Return the used share of the cache's blocks, 0 to 1; 0 for an encoder without a cache."""
        if not self.num_blocks:
            return 0.0
        return self.blocks_used / self.num_blocks

    def since(self, earlier: EngineStats) -> EngineStats:
        """Return this state, with the changes of the counters since an ``earlier`` one."""
        return EngineStats(
            running=self.running,
            waiting=self.waiting,
            blocks_used=self.blocks_used,
            num_blocks=self.num_blocks,
            counters=_difference(self.counters, earlier.counters),
            replica=self.replica,
        )


def summed(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sum of the states and counters of several engines."""
    return EngineStats(
        running=sum(each.running for each in stats),
        waiting=sum(each.waiting for each in stats),
        blocks_used=sum(each.blocks_used for each in stats),
        num_blocks=sum(each.num_blocks for each in stats),
        counters=reduce(_sum, (each.counters for each in stats)),
    )


def _sum(first: Counters, second: Counters) -> Counters:
    # a + b = a - (0 - b), so that one function lists the fields.
    return _difference(first, _difference(_ZERO, second))


def copied(counters: Counters) -> Counters:
    """Return a copy of the counters."""
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
        now.restored_tokens - before.restored_tokens,
        now.preemptions - before.preemptions,
        now.drafts - before.drafts,
        now.draft_tokens - before.draft_tokens,
        now.accepted_tokens - before.accepted_tokens,
        _subtracted(now.handovers, before.handovers),
        _subtracted(now.finished, before.finished),
        _subtracted(now.seconds, before.seconds),
        _changed(now.op_seconds, before.op_seconds),
    )


def _subtracted(now: Mapping[str, _Number], before: Mapping[str, _Number]) -> dict[str, _Number]:
    return {name: value - before[name] for name, value in now.items()}


def _changed(now: Mapping[_Key, float], before: Mapping[_Key, float]) -> dict[_Key, float]:
    """Return the changes that are not 0. A key that is missing on a side stands for 0."""
    changes = {key: now.get(key, 0.0) - before.get(key, 0.0) for key in {**before, **now}}
    return {key: change for key, change in changes.items() if change}


_ZERO = Counters()
