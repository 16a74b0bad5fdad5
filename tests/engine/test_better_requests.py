"""What a better request gets of worse ones under the policy "priority"."""

from __future__ import annotations

from support.scheduling import counts, prioritised, step
from support.simulated_runner import make_scheduler


def test_a_better_request_takes_the_place_of_a_worse_one() -> None:
    """Under "priority" the worst of those that run gives its place, and goes on with its tokens afterwards."""
    scheduler = make_scheduler(max_num_seqs=2, policy="priority")
    for number, name in enumerate(("worse", "worst")):
        scheduler.add(prioritised(name, 5, 10 * number, number + 1, max_tokens=9))
    step(scheduler)
    scheduler.add(prioritised("better", 6, 50, 0, max_tokens=2))
    made = step(scheduler)
    assert (made.removed, list(counts(made))) == (("worst",), ["worse", "better"])
    step(scheduler)
    assert [(each.request_id, each.output) for each in scheduler.waiting] == [("worst", [5])]
    assert [new.request_id for new in step(scheduler).added] == ["worst"]
    assert scheduler.counters.preemptions == 1


def test_a_better_request_takes_the_blocks_of_worse_ones() -> None:
    """As many give theirs as it needs, the worst first; nobody else is admitted in that step."""
    scheduler = make_scheduler(num_blocks=9, policy="priority")
    for number, name in enumerate(("equal", "worse", "worst")):
        scheduler.add(prioritised(name, 8, 10 * number, number, max_tokens=3))
    assert list(counts(step(scheduler))) == ["equal", "worse", "worst"]
    scheduler.add(prioritised("better", 14, 50, 0, max_tokens=2))
    made = step(scheduler)
    assert (made.removed, [new.request_id for new in made.added]) == (
        ("worst", "worse"),
        ["better"],
    )
    assert list(counts(made)) == ["equal", "better"]


def test_nobody_gives_way_in_vain_or_to_an_equal() -> None:
    """Where it would not fit without them either, those of a worse priority keep what they have, as equals do."""
    scheduler = make_scheduler(num_blocks=9, policy="priority")
    scheduler.add(prioritised("equal", 20, 10, 0, max_tokens=9))
    scheduler.add(prioritised("worse", 4, 40, 1, max_tokens=9))
    step(scheduler)
    scheduler.add(prioritised("better", 20, 60, 0, max_tokens=2))
    made = step(scheduler)
    assert (made.removed, list(counts(made))) == ((), ["equal", "worse"])
    scheduler = make_scheduler(max_num_seqs=1, policy="fcfs")
    scheduler.add(prioritised("first", 4, 10, 1, max_tokens=9))
    step(scheduler)
    scheduler.add(prioritised("second", 4, 30, 0))
    assert list(counts(step(scheduler))) == ["first"]


def test_a_better_request_comes_before_the_chunks_of_a_worse_prompt() -> None:
    """A long prompt of a worse priority takes what the better one leaves of a step."""
    scheduler = make_scheduler(budget=10, policy="priority")
    scheduler.add(prioritised("worse", 40, 10, 1))
    assert counts(step(scheduler)) == {"worse": 10}
    scheduler.add(prioritised("better", 7, 60, 0))
    assert counts(step(scheduler)) == {"worse": 3, "better": 7}
    assert counts(step(scheduler)) == {"better": 1, "worse": 9}
