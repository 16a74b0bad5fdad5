"""The figures of a load test are what they are called."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")

from opgraft.bench.client import Outcome
from opgraft.bench.report import Limits, Spread, percentile, report

numpy = pytest.importorskip("numpy")


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_numpys(count: int, percent: float) -> None:
    """Between two values the percentile is interpolated, at the ends it is one of them."""
    values = sorted(float(v) for v in numpy.random.default_rng(0).random(count))
    assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_there_is_no_percentile_of_nothing() -> None:
    """Nothing has no percentile and no spread."""
    with pytest.raises(ValueError, match="no percentile of no values"):
        percentile([], 50)
    assert Spread.of([]) is None


def outcomes() -> list[Outcome]:
    """Two answers of 3 and 2 tokens, a refusal, and an answer that was cut off."""
    return [
        Outcome(10.0, 14.0, [11.0, 12.0, 14.0], prompt_tokens=5, output_tokens=3),
        Outcome(11.0, 18.0, [15.0, 18.0], prompt_tokens=7, output_tokens=2),
        Outcome(12.0, 12.1, error="429"),
        Outcome(12.0, 20.0, [13.0], prompt_tokens=9, output_tokens=1, error="incomplete"),
    ]


def test_a_report_sums_up_answers_and_counts_failures() -> None:
    """Tokens and latencies are of answered requests; the time goes on to the end of the last, failed or not."""
    found = report("2 at a time", outcomes(), Limits())
    assert (found.seconds, found.requests, found.completed) == (10.0, 4, 2)
    assert (found.prompt_tokens, found.output_tokens) == (12, 5)
    assert found.output_tokens_per_second == pytest.approx(0.5)
    assert found.errors == {"429": 1, "incomplete": 1}
    assert found.time_to_first_token == Spread(2.5, 2.5, pytest.approx(3.7), pytest.approx(3.97))
    assert found.time_per_output_token is not None
    assert found.time_per_output_token.mean == pytest.approx((1.5 + 3) / 2)
    assert found.inter_token_latency is not None
    assert found.inter_token_latency.p50 == 2.0
    assert found.end_to_end is not None
    assert found.end_to_end.mean == 5.5


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(), 2),
        (Limits(time_to_first_token=1.0), 1),
        (Limits(time_per_output_token=1.5), 1),
        (Limits(end_to_end=3.9), 0),
        (Limits(time_to_first_token=4, time_per_output_token=3, end_to_end=7), 2),
    ],
)
def test_goodput_counts_what_was_fast_enough(limits: Limits, good: int) -> None:
    """Goodput is of answered requests within every limit."""
    assert report("", outcomes(), limits).goodput == pytest.approx(good / 10)


def test_a_load_of_which_nothing_was_answered_has_a_report() -> None:
    """Where every request failed, rates are 0 and there are no latencies."""
    found = report("", outcomes()[2:3], Limits())
    assert (found.completed, found.goodput, found.end_to_end) == (0, 0.0, None)
