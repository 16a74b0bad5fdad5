"""The choice of a replica: a pure function, and what the router remembers of prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opgraft import CustomOp
from opgraft.serving.replicas import BLOCK, WORTH, RequestRouter, choose_replica

LOADS = st.dictionaries(st.integers(0, 7), st.integers(0, 10_000), min_size=1)
HELD = st.dictionaries(st.integers(0, 7), st.integers(0, 4_000))


@given(LOADS)
def test_without_a_prefix_the_least_loaded_is_chosen(loads: dict[int, int]) -> None:
    """Nothing but the load counts where nobody holds a beginning."""
    assert loads[choose_replica(loads, {})] == min(loads.values())


@given(LOADS, HELD)
def test_nobody_waits_longer_than_the_prefix_is_worth(
    loads: dict[int, int], held: dict[int, int]
) -> None:
    """The chosen one is ahead of any other by at most what the tokens that it holds more are worth."""
    chosen = choose_replica(loads, held)
    for other in loads:
        assert loads[chosen] - loads[other] <= WORTH * (held.get(chosen, 0) - held.get(other, 0))


@given(LOADS, HELD, st.integers(0, 7), st.integers(1, 10_000))
def test_more_load_on_another_changes_nothing(
    loads: dict[int, int], held: dict[int, int], at: int, more: int
) -> None:
    """The choice stays when a replica that was not chosen gets more to do, or is lost."""
    chosen = choose_replica(loads, held)
    if at in loads and at != chosen:
        assert choose_replica({**loads, at: loads[at] + more}, held) == chosen
        assert (
            choose_replica({name: load for name, load in loads.items() if name != at}, held)
            == chosen
        )


@given(LOADS, HELD, st.permutations(range(8)))
def test_numbers_of_replicas_decide_between_equals_only(
    loads: dict[int, int], held: dict[int, int], names: list[int]
) -> None:
    """Under other numbers one of the same load and the same prefix is chosen."""
    chosen = choose_replica(loads, held)
    other = choose_replica(
        {names[name]: load for name, load in loads.items()},
        {names[name]: count for name, count in held.items()},
    )
    back = names.index(other)
    assert loads[back] == loads[chosen]
    assert held.get(back, 0) == held.get(chosen, 0)


def tokens(first: int, blocks: int) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


def test_prompts_go_to_where_their_beginnings_are() -> None:
    """A longer turn follows its session, another salt does not, and a large imbalance wins."""
    router = RequestRouter([1000 * BLOCK] * 2)
    assert router.route(tokens(0, 4), None, {0: 0, 1: 0}) == 0
    assert router.route(tokens(500, 4), None, {0: 70, 1: 0}) == 1
    longer = tokens(0, 6)
    assert router.route(longer, None, {0: 10, 1: 0}) == 0
    assert router.route(longer, "salt", {0: 10, 1: 0}) == 1
    assert router.route(longer, None, {0: WORTH * 6 * BLOCK + 1, 1: 0}) == 1
    router.forget(0)
    assert router.route(longer, None, {0: 0, 1: 100}) == 1


def test_it_remembers_as_much_as_the_cache_has_room_for() -> None:
    """The prompt that was used for longest is forgotten first, its end before its beginning; no room, no memory."""
    router = RequestRouter([6 * BLOCK, 0])
    for first in (0, 1000, 0, 2000):
        router.route(tokens(first, 3), None, {0: 0})
    assert len(router._known[0]) == 6
    assert router.route(tokens(0, 3), None, {0: WORTH * 3 * BLOCK - 1, 1: 0}) == 0
    router.route(tokens(3000, 4), None, {0: 0})
    assert router.route(tokens(2000, 3), None, {0: 1, 1: 0}) == 1
    assert router.route(tokens(7, 5), None, {0: 0, 1: 1}) == 0
    assert not router._known[1]


def test_a_plugin_replaces_the_policy() -> None:
    """The router is constructed through the registry, like every part of the engine."""

    @CustomOp.register_oot(name="RequestRouter")
    class Last(RequestRouter):
        def route(self, tokens: object, cache_salt: object, loads: object) -> int:
            return max(loads)  # type: ignore[call-overload,no-any-return]

    assert RequestRouter([0, 0]).route([1], None, {0: 0, 1: 9}) == 1
