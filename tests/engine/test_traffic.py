"""Random traffic through the scheduler and the cache: what must hold whatever comes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opgraft.engine.schedule.kv_cache import LayerKind
from support.held import ROUNDS, in_each, rounds
from support.simulated_runner import Traffic, make_scheduler

KINDS = st.lists(st.sampled_from([None, 1, 3, 8, 13]), min_size=1, max_size=3, unique=True)


@settings(max_examples=100)
@given(
    windows=KINDS, block_size=st.integers(1, 8), spare=st.integers(0, 10), prefix_reuse=st.booleans(),
    max_model_len=st.integers(2, 40), max_num_seqs=st.integers(1, 6), budget=st.integers(1, 40), chunked=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]), seed=st.integers(0, 2**32),
    reserve=st.booleans(), depth=st.sampled_from([1, 1, 2, 3]), faults=st.sampled_from([0.0, 0.05]),
    drafts=st.sampled_from([0, 0, 1, 5]),
)  # fmt: skip
def test_random_traffic(
    windows: Sequence[int | None], block_size: int, spare: int, prefix_reuse: bool, max_model_len: int,
    max_num_seqs: int, budget: int, chunked: bool, policy: str, seed: int, reserve: bool,
    depth: int, faults: float, drafts: int,
) -> None:  # fmt: skip
    """Each request gets the output that it gets alone, once, within all limits, and every block comes back.

    The cache has room for one request, and for little more. Several steps are computed at a time, and some fail. Some
    schedulers draft tokens, right ones and wrong ones.
    """
    kinds = [LayerKind(window) for window in windows]
    budget = budget if chunked else max(budget, max_model_len)
    least = sum(kind.most_blocks(max_model_len, budget, block_size) for kind in kinds)
    scheduler = make_scheduler(
        kinds, num_blocks=least + spare, block_size=block_size, prefix_reuse=prefix_reuse, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, budget=budget, chunked=chunked, policy=policy, depth=depth, drafts=drafts,
    )  # fmt: skip
    if not reserve:
        scheduler._reserve = lambda: 0  # type: ignore[method-assign]
    Traffic(scheduler, random.Random(seed), faults=faults).run(15)  # noqa: S311


def traffic(
    seed: int, num_blocks: int = 30, policy: str = "fcfs", checked: bool = True, depth: int = 1
) -> Traffic:
    kinds = [LayerKind(), LayerKind(8)]
    sizes = {"num_blocks": num_blocks, "max_model_len": 32, "budget": 16}
    scheduler = make_scheduler(kinds, **sizes, policy=policy, depth=depth)  # type: ignore[arg-type]
    return Traffic(scheduler, random.Random(seed), checked)  # noqa: S311


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_traffic_under_pressure(policy: str, depth: int) -> None:
    """The same where the cache is too small for those that run, so that many are preempted, and many are forked."""
    driven = traffic(1, policy=policy, depth=depth)
    driven.scheduler._reserve = lambda: 0  # type: ignore[method-assign]  # which otherwise prevents most of it
    driven.run(300, rate=0.8)
    assert len(driven.answers) >= 300
    assert sum(request.num_preemptions for request in driven.answers) > 20
    assert sum(request.num_cached > 0 for request in driven.answers) > 50


@pytest.mark.parametrize("requests", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_requests_leave_nothing(requests: int) -> None:
    """Thousands of requests with aborts leave no more objects than the first did."""
    driven = traffic(2, num_blocks=60, checked=False)
    driven.run(requests // 10, aborts=0.05)
    growth: list[int] = []
    for _ in rounds(growth):
        driven.run(driven.number + requests // ROUNDS, aborts=0.05)
    assert in_each(growth) < requests // ROUNDS // 10, growth
