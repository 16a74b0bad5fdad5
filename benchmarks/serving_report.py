"""Figures of a load test: throughput, latencies with percentiles, errors and goodput."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean

from serving_client import Outcome

_PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which ``percent`` of sorted values lie, by linear interpolation as in NumPy.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("there is no percentile of no values: give at least one")
    place = (len(values) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the spread of values, or None if there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(fmean(ordered), *(percentile(ordered, percent) for percent in _PERCENTILES))


@dataclass(frozen=True)
class Limits:
    """Longest seconds of a good request; None for no limit."""

    time_to_first_token: float | None = None
    time_per_output_token: float | None = None
    end_to_end: float | None = None

    def hold(self, outcome: Outcome) -> bool:
        """Return True if an answered request met every limit; without a token to time, a limit is met."""
        measured = {
            "time_to_first_token": time_to_first_token(outcome),
            "time_per_output_token": time_per_output_token(outcome),
            "end_to_end": outcome.seconds,
        }
        return all(
            limit is None or (measured[name] or 0.0) <= limit
            for name, limit in asdict(self).items()
        )


def time_to_first_token(outcome: Outcome) -> float | None:
    """Return the seconds until the first token, or None if there is no token."""
    return outcome.arrivals[0] - outcome.due if outcome.arrivals else None


def time_per_output_token(outcome: Outcome) -> float | None:
    """Return the mean seconds from token to token, or None for fewer than two tokens."""
    if outcome.output_tokens < 2 or not outcome.arrivals:
        return None
    return (outcome.arrivals[-1] - outcome.arrivals[0]) / (outcome.output_tokens - 1)


@dataclass(frozen=True)
class Report:
    """Figures of one load. Rates are per second from the first request's start to the last answer's end.

    Attributes:
        load: the load's label.
        seconds: duration of the load.
        requests: number of requests sent.
        completed: number of requests answered to the end; tokens and latencies count these only.
        goodput: completed requests within the limits, per second.
        errors: numbers of failed requests, by kind.
        messages: message of the first failed request of each kind, if it had one.
        inter_token_latency: seconds between parts of the text, which hold a token each if nothing delays them.
    """

    load: str
    seconds: float
    requests: int
    completed: int
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    goodput: float
    errors: Mapping[str, int]
    messages: Mapping[str, str]
    time_to_first_token: Spread | None
    time_per_output_token: Spread | None
    inter_token_latency: Spread | None
    end_to_end: Spread | None


def report(load: str, outcomes: Sequence[Outcome], limits: Limits) -> Report:
    """Sum up the outcomes of a load."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    seconds = max(outcome.ended for outcome in outcomes) - min(outcome.due for outcome in outcomes)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    failed = [(outcome.error, outcome) for outcome in outcomes if outcome.error is not None]
    return Report(
        load=load,
        seconds=seconds,
        requests=len(outcomes),
        completed=len(done),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_second=len(done) / seconds,
        prompt_tokens_per_second=prompt_tokens / seconds,
        output_tokens_per_second=output_tokens / seconds,
        goodput=sum(map(limits.hold, done)) / seconds,
        errors=dict(sorted(Counter(kind for kind, _ in failed).items())),
        messages={kind: outcome.message for kind, outcome in reversed(failed) if outcome.message},
        time_to_first_token=Spread.of(_known(map(time_to_first_token, done))),
        time_per_output_token=Spread.of(_known(map(time_per_output_token, done))),
        inter_token_latency=Spread.of(
            later - earlier for outcome in done for earlier, later in pairwise(outcome.arrivals)
        ),
        end_to_end=Spread.of(outcome.seconds for outcome in done),
    )


def _known(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)
