"""The comparison of runs of one model with and without a plugin. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_CLOSE = {"float64": 2e-3, "float32": 2e-3}
_COARSE = 0.05
"""By dtype of the model, the most that a log-probability may change, plus that share of its size.

Rounding to bfloat16 changes the log-probabilities of a deep model by about the last figure.
"""

_SLOWER, _LEAST_SLOWER = 1.15, 2e-4
"""A slower step takes more than this factor, and these seconds more."""

_OP_SLOWER, _LEAST_SHARE = 1.5, 0.1
"""A slower op takes more than this factor, and this share of all ops more."""

_LATER, _LEAST_LATER = 1.5, 2.0
"""A later start takes more than this factor, and these seconds more."""

_LARGER, _LEAST_LARGER = 1.1, 64 << 20
"""A larger process takes more than this factor, and these bytes more."""

_GROWS_MORE, _GROWS = 2.0, 1 << 19
"""A growing process grows in each round by more than this factor, and these bytes more."""


@dataclass(frozen=True)
class TrialRun:
    """A run of the model in a process of its own.

    Attributes:
        status, reason: of the plugin in this run.
        dtype: of the model.
        start: seconds until the model had answered for the first time.
        kernels: kernel and provider, as ``rms_norm: Kernel of provider``, with the count.
        tokens: of each answer.
        logprobs: at each place of each answer, the log-probabilities of the chosen token and of the
            likeliest ones. Tokens are text, as keys of JSON are.
        repeats: all rounds have given the same answers.
        step: seconds of a step, the median of the rounds.
        ops: seconds of each op in a step, without the ops within it.
        peak: the most bytes of the process in the host's memory.
        growth: bytes of the host's memory that a round has added to the process.
    """

    status: str
    reason: str
    dtype: str
    start: float
    kernels: dict[str, int]
    tokens: list[list[int]]
    logprobs: list[list[dict[str, float]]]
    repeats: bool
    step: float
    ops: dict[str, float]
    peak: int
    growth: float


Pair = tuple[TrialRun, TrialRun]
"""A run without the plugin, and one with it."""

Figure = Callable[[TrialRun], float]
"""A figure of a run. Less is better."""


class Place(NamedTuple):
    """A place of an answer: the token and the log-probabilities, without the plugin and with it."""

    token: str
    other: str
    before: Mapping[str, float]
    after: Mapping[str, float]


class Fault(NamedTuple):
    """Something that got worse. ``of_time`` marks a time, which other programs change, too."""

    words: str
    of_time: bool = False


@dataclass(frozen=True)
class Trial:
    """All runs, and the faults in words.

    Attributes:
        pairs: the complete ones.
        worse: the faults.
        unpaired: the last run without the plugin, if the model fails with the plugin.
    """

    pairs: Sequence[Pair]
    worse: tuple[str, ...]
    unpaired: TrialRun | None = None

    def changed_kernels(self) -> Iterator[tuple[str, str, str]]:
        """Yield each op with other kernels: the op, the kernels without, and those with it."""
        before, after = self.pairs[-1]
        without = _by_op(before.kernels)
        within = _by_op(after.kernels)
        for op in sorted({*without, *within}):
            if without.get(op) != within.get(op):
                yield op, without.get(op, ""), within.get(op, "")

    def times(self) -> Iterator[tuple[str, float, float]]:
        """Yield the seconds of a step, and of each op within, without the plugin and with it."""
        yield "in total", *_least(self.pairs, step_of)
        for op in ops_of(self.pairs):
            yield op, *_least(self.pairs, seconds_of(op))

    def summary(self) -> str:
        """Return a sentence about tokens, log-probabilities, start and memory."""
        without, within = self.pairs[-1]
        changed = differing_tokens(without, within)
        tokens = sum(len(row) for row in without.tokens)
        change = largest_change(without, within)
        before = without.peak >> 20
        after = within.peak >> 20
        return (
            f"{changed} tokens of {tokens} changed, the largest change of a log-probability is "
            f"{change:.2g}; ready after {without.start:.1f} s without and {within.start:.1f} s "
            f"with it; at most {before} MiB of the host without and {after} MiB with it"
        )


def _by_op(kernels: Mapping[str, int]) -> dict[str, str]:
    """Return the kernels of each op in words, with their counts."""
    named: dict[str, list[str]] = {}
    for row, count in sorted(kernels.items()):
        op, _, kernel = row.partition(": ")
        named.setdefault(op, []).append(f"{count} {kernel}")
    return {op: ", ".join(rows) for op, rows in named.items()}


def step_of(run: TrialRun) -> float:
    """Return the seconds of a step."""
    return run.step


def seconds_of(op: str) -> Figure:
    """Return the figure that tells the seconds of an op; 0 if the op did not run."""

    def seconds(run: TrialRun) -> float:
        return run.ops.get(op, 0.0)

    return seconds


def ops_of(pairs: Sequence[Pair]) -> list[str]:
    """Return the names of the ops in any of the runs, sorted."""
    names: set[str] = set()
    for without, within in pairs:
        names.update(without.ops, within.ops)
    return sorted(names)


def differing_tokens(without: TrialRun, within: TrialRun) -> int:
    """Return the number of tokens that differ."""
    changed = 0
    for before, after in zip(without.tokens, within.tokens, strict=True):
        for mine, theirs in zip(before, after, strict=True):
            changed += mine != theirs
    return changed


def largest_change(without: TrialRun, within: TrialRun) -> float:
    """Return the largest change of a log-probability; infinite if one is no number.

    Answers are compared up to the first token that differs. The rest has another beginning.
    """
    largest = 0.0
    for token, _, before, after in _compared(without, within):
        values = [*before.values(), *after.values()]
        if any(map(math.isnan, values)):
            return math.inf
        # A token that changes may be none of the likeliest ones any more.
        if token not in after:
            continue
        change = abs(before[token] - after[token])
        largest = max(largest, change)
    return largest


def _compared(without: TrialRun, within: TrialRun) -> Iterator[Place]:
    """Yield each place of each answer up to the first token that differs."""
    for number, tokens in enumerate(without.tokens):
        others = within.tokens[number]
        former = without.logprobs[number]
        present = within.logprobs[number]
        for token, other, before, after in zip(tokens, others, former, present, strict=True):
            yield Place(str(token), str(other), before, after)
            if token != other:
                break


def _allowed(without: TrialRun, within: TrialRun) -> float:
    """Return the most that a log-probability may change."""
    largest = 0.0
    for number, tokens in enumerate(without.tokens):
        places = without.logprobs[number]
        for token, place in zip(tokens, places, strict=True):
            size = abs(place[str(token)])
            largest = max(largest, size)
    share = _CLOSE.get(within.dtype, _COARSE)
    return share * (1 + largest)


def _is_tie(place: Place, allowed: float) -> bool:
    """Return True if both runs give the two tokens of a place about the same log-probability.

    Rounding decides between such tokens. The run with the plugin must still choose the token that
    is likelier by its own log-probabilities.
    """
    values = []
    for run in (place.before, place.after):
        for token in (place.token, place.other):
            if token not in run:
                return False
            values.append(run[token])
    spread = max(values) - min(values)
    if spread > allowed:
        return False
    return place.after[place.other] >= place.after[place.token]


def _changed_tokens(without: TrialRun, within: TrialRun) -> int:
    """Return the number of tokens that differ; 0 if rounding alone changes the answers."""
    allowed = _allowed(without, within)
    for place in _compared(without, within):
        if place.token == place.other:
            continue
        if not _is_tie(place, allowed):
            return differing_tokens(without, within)
    return 0


def _change_of_logprobs(without: TrialRun, within: TrialRun) -> float:
    """Return the largest change of a log-probability; 0 if rounding changes as much."""
    change = largest_change(without, within)
    if change <= _allowed(without, within):
        return 0.0
    return change


def faults_of(pairs: Sequence[Pair]) -> list[Fault]:
    """Return what got worse, each fault once.

    A loss of time or of memory must show in every pair. For answers, one pair is enough.
    """
    return [*_faults_of_answers(pairs), *_faults_of_time(pairs), *_faults_of_memory(pairs)]


def _faults_of_answers(pairs: Sequence[Pair]) -> Iterator[Fault]:
    reasons = [within.reason for _, within in pairs if within.status == "failed"]
    if reasons:
        yield Fault(f"the plugin fails: {reasons[0]}")
    tokens = max(_changed_tokens(*pair) for pair in pairs)
    if tokens:
        yield Fault(f"{tokens} tokens changed")
    change = max(_change_of_logprobs(*pair) for pair in pairs)
    if change:
        yield Fault(f"log-probabilities change by up to {change:.2g}")
    if any(without.repeats and not within.repeats for without, within in pairs):
        yield Fault("the same request gets other answers from round to round")


def _faults_of_time(pairs: Sequence[Pair]) -> Iterator[Fault]:
    slower = _worsening(pairs, step_of, _SLOWER, _LEAST_SLOWER)
    if slower:
        yield Fault(f"a step takes {slower:.2f} times as long", of_time=True)
    totals = [sum(without.ops.values()) for without, _ in pairs]
    least = _LEAST_SHARE * min(totals)
    for op in ops_of(pairs):
        longer = _worsening(pairs, seconds_of(op), _OP_SLOWER, least)
        if longer:
            yield Fault(f"{op} takes {longer:.2f} times as long", of_time=True)
    later = _worsening(pairs, lambda run: run.start, _LATER, _LEAST_LATER)
    if later:
        yield Fault(f"the model is ready after {later:.2f} times as long", of_time=True)


def _faults_of_memory(pairs: Sequence[Pair]) -> Iterator[Fault]:
    larger = _worsening(pairs, lambda run: run.peak, _LARGER, _LEAST_LARGER)
    if larger:
        yield Fault(f"the process takes {larger:.2f} times as much memory")
    grows = _worsening(pairs, lambda run: max(run.growth, 0.0), _GROWS_MORE, _GROWS)
    if grows:
        _, left = _least(pairs, lambda run: run.growth)
        yield Fault(f"each round of answers leaves {left / (1 << 20):.1f} MiB behind")


def _least(pairs: Sequence[Pair], figure: Figure) -> tuple[float, float]:
    """Return the least of a figure in the runs without the plugin, and in those with it."""
    before = [figure(without) for without, _ in pairs]
    after = [figure(within) for _, within in pairs]
    return min(before), min(after)


def _worsening(pairs: Sequence[Pair], figure: Figure, factor: float, least: float) -> float:
    """Return the growth of a figure as a factor; 0 if it is below ``factor`` or ``least``.

    The best run with the plugin is compared with the worst run without it.
    """
    worst = max(figure(without) for without, _ in pairs)
    best = min(figure(within) for _, within in pairs)
    if best <= factor * worst or best - worst <= least:
        return 0.0
    # An op that did not run without the plugin has no factor.
    return best / max(worst, 1e-9)
