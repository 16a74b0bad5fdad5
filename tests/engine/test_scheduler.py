"""The scheduler, one rule at a time."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from opgraft.engine.request import Request
from opgraft.engine.schedule.kv_cache import LayerKind
from opgraft.errors import RequestError
from support.scheduling import adapted, counts, distinct, request, step
from support.simulated_runner import make_scheduler


def test_a_prompt_comes_in_chunks_beside_decodes() -> None:
    """A decode takes one token of the budget, a prompt the rest, until it is through and samples."""
    scheduler = make_scheduler(budget=8)
    scheduler.add(request("short"))
    step(scheduler)
    scheduler.add(request("long", 16, token=2))
    assert counts(step(scheduler)) == {"short": 1, "long": 7}
    assert counts(step(scheduler)) == {"short": 1, "long": 7}
    last = step(scheduler)
    assert counts(last) == {"short": 1, "long": 2}
    assert last.sequences[1].start == 14
    assert last.sequences[1].samples


def test_a_short_request_overtakes_long_prompts() -> None:
    """Beside three prompts of 5,600 tokens, a short one has its first token in the step after its arrival."""
    scheduler = make_scheduler(budget=2048, max_model_len=8192, num_blocks=5000)
    for token in (1, 2, 3):
        scheduler.add(request(f"long {token}", 5600, token=token))
    assert counts(step(scheduler)) == {"long 1": 2048}
    scheduler.add(request("short", 20, token=4))
    second = step(scheduler)
    assert counts(second) == {"long 1": 2028, "short": 20}
    assert second.sequences[1].samples
    # A decode gets its token, too, and the long prompts use the rest of each step.
    assert counts(step(scheduler)) == {"long 1": 1524, "short": 1, "long 2": 523}


def test_a_long_prompt_takes_the_whole_step_if_no_short_one_can_be_admitted() -> None:
    """Short requests that wait for blocks take nothing from the steps of a running long prompt."""
    scheduler = make_scheduler(budget=16, num_blocks=26, max_model_len=96)
    scheduler.add(request("long", 90))
    assert counts(step(scheduler)) == {"long": 16}
    scheduler.add(request("next", 90, token=2))
    scheduler.add(request("short", 4, token=3))
    assert counts(step(scheduler)) == {"long": 16}


def test_long_prompts_are_computed_while_short_ones_come() -> None:
    """Each of the long prompts, in their order, is through in a bounded number of steps."""
    scheduler = make_scheduler(budget=16, num_blocks=200)
    for token in (1, 2):
        scheduler.add(request(f"long {token}", 48, token=token))
    seen: list[str] = []
    for number in range(14):
        # More than a step takes.
        for short in range(6):
            name = f"short {number} {short}"
            scheduler.add(request(name, 4, token=3 + 6 * number + short, max_tokens=1))
        seen += [each.request_id for each in step(scheduler).sequences if each.samples]
    assert seen.index("long 1") < seen.index("long 2")
    assert seen.index("short 0 0") < seen.index("long 1")


def test_long_prompts_that_leave_no_room() -> None:
    """With a threshold of 0, a long prompt takes the whole step, as it came first."""
    scheduler = make_scheduler(budget=16, long_prefill_token_threshold=0)
    scheduler.add(request("long", 40))
    step(scheduler)
    scheduler.add(request("short", 2, token=2))
    assert counts(step(scheduler)) == {"long": 16}


def test_a_long_prompt_leaves_no_room_to_less_urgent_ones() -> None:
    """A short request of a worse priority waits, and an equal one does not."""
    scheduler = make_scheduler(budget=16, policy="priority")
    scheduler.add(request("long", 48))
    step(scheduler)
    scheduler.add(request("later", 2, token=2, priority=1))
    assert counts(step(scheduler)) == {"long": 16}
    scheduler.add(request("equal", 2, token=3))
    assert counts(step(scheduler)) == {"long": 14, "equal": 2}


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole() -> None:
    """With chunked_prefill off a prompt is computed at once, and those behind it wait too."""
    scheduler = make_scheduler(budget=8, chunked=False)
    for name, length, token in (("a", 5, 1), ("b", 6, 2), ("c", 1, 3)):
        scheduler.add(request(name, length, token=token))
    assert counts(step(scheduler)) == {"a": 5}
    assert counts(step(scheduler)) == {"a": 1, "b": 6, "c": 1}


def test_requests_without_an_adapter_overtake_one_that_lacks_a_slot() -> None:
    """Requests with the running adapter wait behind it, so that it has the slot next."""
    scheduler = make_scheduler(max_loras=1)
    for name, number in (("a", 1), ("b", 2), ("c", 0), ("d", 1)):
        scheduler.add(adapted(name, number, max_tokens=2))
    assert [counts(step(scheduler)).keys() for _ in range(3)] == [
        {"a", "c"},
        {"a", "c"},
        {"b"},
    ]


def test_an_urgent_request_preempts_the_requests_of_one_adapter() -> None:
    """Others that cannot free a slot, or are more than needed, go on."""
    scheduler = make_scheduler(max_loras=2, policy="priority")
    for name, number, priority in (("a", 1, 1), ("b", 2, 1), ("c", 2, 2), ("d", 0, 3)):
        scheduler.add(adapted(name, number, priority=priority, max_tokens=9))
    assert counts(step(scheduler)).keys() == {"a", "b", "c", "d"}
    scheduler.add(adapted("urgent", 3, priority=0, max_tokens=9))
    assert counts(step(scheduler)).keys() == {"urgent", "b", "c", "d"}
    assert scheduler.counters.preemptions == 1


def test_no_more_than_max_num_seqs_run() -> None:
    """Requests beyond the limit wait for one to finish."""
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, max_tokens=2))
    assert [counts(step(scheduler)).keys() for _ in range(3)] == [{"a", "b"}, {"a", "b"}, {"c"}]


def test_order_is_by_priority_then_arrival() -> None:
    """Lower priorities go first; under fcfs they mean nothing."""
    for policy, order in (("priority", ["b", "c", "a", "d"]), ("fcfs", ["a", "b", "c", "d"])):
        scheduler = make_scheduler(policy=policy)
        for name, priority in (("a", 1), ("b", -1), ("c", 0), ("d", 1)):
            scheduler.add(request(name, priority=priority))
        assert list(counts(step(scheduler))) == order


@pytest.mark.parametrize(
    ("policy", "victim", "next_in_line"), [("fcfs", "c", "d"), ("priority", "a", "d")]
)
def test_the_last_is_preempted_and_none_is_admitted(
    policy: str, victim: str, next_in_line: str
) -> None:
    """Where blocks run out the last gives its own to the others; its tokens are kept, and it waits before newcomers."""
    scheduler = make_scheduler(num_blocks=6, block_size=4, policy=policy, max_num_seqs=3)
    for name, priority, first in (("a", 1, 10), ("b", 0, 20), ("c", 0, 30)):
        added = distinct(name, 4, first, max_tokens=12)
        added.priority = priority
        scheduler.add(added)
    scheduler._reserve = lambda: 0  # type: ignore[method-assign]  # so that all are admitted at once
    for _ in range(5):
        step(scheduler)
    newcomer = distinct(next_in_line, 1, 90, max_tokens=1)
    newcomer.priority = 5
    scheduler.add(newcomer)
    made = step(scheduler)
    assert made.removed == (victim,)
    assert made.added == ()
    assert victim not in counts(made)
    waiting = scheduler.waiting[0]
    assert (waiting.request_id, waiting.status, waiting.num_computed, waiting.num_preemptions) == (
        victim, "waiting", 0, 1,
    )  # fmt: skip
    assert waiting.output == [5] * 5


def test_the_last_keeps_its_blocks_and_waits_where_only_it_lacks_one() -> None:
    """Nobody is computed anew because of a block that it asks for itself."""
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler._reserve = lambda: 0  # type: ignore[method-assign]
    scheduler.add(distinct("a", 5, 10, max_tokens=3))
    scheduler.add(distinct("b", 7, 20, max_tokens=8))
    seen = [step(scheduler) for _ in range(4)]
    assert [list(counts(made)) for made in seen] == [["a", "b"], ["a", "b"], ["a"], ["b"]]
    assert [made.removed for made in seen] == [(), (), (), ("a",)]


def test_admission_leaves_blocks_for_those_that_run() -> None:
    """The whole sequence must fit, and a block more for each that runs; the first of all needs no more than itself."""
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    scheduler.add(distinct("a", 8, 10, max_tokens=4))
    scheduler.add(distinct("b", 15, 30, max_tokens=1))
    assert counts(step(scheduler)) == {"a": 8}
    scheduler = make_scheduler(num_blocks=7, block_size=4)
    scheduler.add(distinct("a", 8, 10, max_tokens=4))
    scheduler.add(distinct("b", 15, 30, max_tokens=1))
    assert counts(step(scheduler)) == {"a": 8, "b": 15}


def test_tokens_that_are_computed_anew_count_as_prompt() -> None:
    """Also where the last chunk of a sequence that was preempted has one token."""
    scheduler = make_scheduler(budget=4)
    scheduler.add(distinct("a", 6, 10, max_tokens=9))
    for _ in range(4):
        step(scheduler)
    counted = scheduler.counters
    assert (counted.prompt_tokens, counted.decode_tokens) == (6, 2)
    scheduler._preempt(scheduler.running[0])
    scheduler.cache.clear()
    assert [counts(step(scheduler)) for _ in range(4)] == [{"a": 4}, {"a": 4}, {"a": 1}, {"a": 1}]
    assert (counted.prompt_tokens, counted.decode_tokens) == (15, 3)


@pytest.mark.parametrize("kinds", [[LayerKind()], [LayerKind(), LayerKind(6)]])
def test_a_reused_prefix_leaves_a_token_to_compute(kinds: list[LayerKind]) -> None:
    """The same prompt again computes its last token only, where its length is a multiple of the block too."""
    scheduler = make_scheduler(kinds)
    scheduler.add(distinct("a", 12, 10, max_tokens=1))
    step(scheduler)
    scheduler.add(distinct("b", 12, 10, max_tokens=1))
    made = step(scheduler)
    assert counts(made) == {"b": 4}
    assert made.sequences[0].start == 8
    scheduler.add(distinct("c", 13, 10, max_tokens=1))
    assert counts(step(scheduler)) == {"c": 1}


def test_blocks_that_others_use_need_no_room() -> None:
    """A request is admitted where only the rest of it fits beside one that shares its beginning."""
    scheduler = make_scheduler(num_blocks=7, block_size=4)
    scheduler.add(distinct("a", 16, 10, max_tokens=4))
    step(scheduler)
    scheduler.add(distinct("b", 16, 10, max_tokens=4))
    assert counts(step(scheduler)) == {"a": 1, "b": 4}


def test_requests_of_another_salt_share_nothing() -> None:
    """A prefix is found by requests of the same salt only."""
    scheduler = make_scheduler()
    for number, salt in enumerate(("tenant-1", "tenant-2", None, "", "tenant-1")):
        added = distinct(str(number), 9, 10, max_tokens=1)
        added.cache_salt = salt
        scheduler.add(added)
        assert counts(step(scheduler)) == {str(number): 1 if number == 4 else 9}


def test_logits_of_the_prompt_are_never_skipped() -> None:
    """A request for log-probabilities of the prompt computes all of it."""
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(distinct(name, 9, 10, max_tokens=1, prompt_logprobs=0))
        assert counts(step(scheduler)) == {name: 9}


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_samples_share_the_prompt_and_copy_the_partial_block(prefix_reuse: bool) -> None:
    """The others of n wait until the prompt is computed, then compute its last token with a block of their own."""
    scheduler = make_scheduler(prefix_reuse=prefix_reuse)
    samples = distinct("r", 10, 10, n=3, seed=7, prompt_logprobs=1).split()
    assert [s.params.seed for s in samples] == [7, 8, 9]
    assert [s.params.prompt_logprobs for s in samples] == [1, None, None]
    for sample in samples:
        scheduler.add(sample)
    first = step(scheduler)
    assert counts(first) == {"r/0": 10}
    forked = step(scheduler)
    assert counts(forked) == {"r/0": 1, "r/1": 1, "r/2": 1}
    (own,) = first.added[0].blocks
    (one,), (two,) = (new.blocks for new in forked.added)
    assert one[:2] == two[:2] == own[:2]
    assert forked.copies == ((own[2], one[2]), (own[2], two[2]))
    assert len({own[2], one[2], two[2]}) == 3


def test_samples_go_on_when_the_first_is_aborted() -> None:
    """Those that share a prompt do not wait for a request that is gone."""
    scheduler = make_scheduler(budget=4)
    for sample in distinct("r", 10, 10, n=2).split():
        scheduler.add(sample)
    assert counts(step(scheduler)) == {"r/0": 4}
    scheduler.abort("r/0")
    assert counts(step(scheduler)) == {"r/1": 4}


def test_a_sample_takes_nothing_of_another_prompt() -> None:
    """An id that ended may be given anew, to another prompt, while samples of the first still wait."""
    scheduler = make_scheduler(max_num_seqs=2, policy="priority", prefix_reuse=False)
    first, second = distinct("r", 10, 10, n=2).split()
    for each in (request("busy", priority=-2, max_tokens=9), first, second):
        scheduler.add(each)
    step(scheduler)
    scheduler.abort("r/0")
    other = distinct("r/0", 12, 40)
    other.priority = -1
    scheduler.add(other)
    step(scheduler)
    scheduler.abort("busy")
    made = step(scheduler)
    (added,) = made.added
    assert (added.request_id, counts(made)["r/1"], made.copies) == ("r/1", 10, ())


def test_abort_between_schedule_and_update() -> None:
    """The token of a request that was aborted meanwhile is dropped, even if its id is in use again."""
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    made = scheduler.schedule()
    aborted = scheduler.abort("a")
    again = request("a")
    scheduler.add(again)
    assert scheduler.update(made, {"a": 5}) == []
    assert (aborted.finish_reason, aborted.output, again.output) == ("abort", [], [])
    made = scheduler.schedule()
    assert made.removed == ("a",)
    assert [new.request_id for new in made.added] == ["a"]


def test_a_request_that_fails_alone_ends_with_an_error() -> None:
    """A failed request is ended by its id; its neighbours go on."""
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    made = scheduler.schedule()
    assert scheduler.abort("a", "error").finish_reason == "error"
    scheduler.update(made, {"b": 5})
    assert counts(step(scheduler)) == {"b": 1}


def test_steps_can_be_sent_to_another_process() -> None:
    """A step is plain data: pickled and back, it is the same."""
    scheduler = make_scheduler()
    scheduler.add(request("a", logit_bias={1: 2.0}, stop="x"))
    made = scheduler.schedule()
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301


@pytest.mark.parametrize(
    ("settings", "added", "message"),
    [
        (
            {},
            request("a", 64),
            "a prompt of 64 tokens, and the context holds 64, prompt and output together: shorten",
        ),
        (
            {"num_blocks": 3},
            request("a", 4, max_tokens=12),
            "^request 'a' may grow to 16 tokens, a prompt of 4 and an output of up to 12, for which it needs 4 blocks "
            "of 4 tokens, and the cache has 3: lower max_tokens, or raise cache.memory_bytes",
        ),
        (
            {"chunked": False, "budget": 8},
            request("a", 9),
            "a prompt of 9 tokens, and a step takes 8, with scheduler",
        ),
    ],
)
def test_what_can_never_be_served_is_refused(
    settings: dict[str, Any], added: Request, message: str
) -> None:
    """The error comes when the request is added, with the numbers and the settings that change them."""
    scheduler = make_scheduler(**settings)
    with pytest.raises(RequestError, match=message):
        scheduler.add(added)
    assert not scheduler.has_work


def test_a_request_that_just_fits_is_served() -> None:
    """The last token of the output is never computed, and needs no block."""
    scheduler = make_scheduler(num_blocks=3)
    scheduler.add(request("a", 4, max_tokens=9))
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.cache.pool.num_free == 3


def test_ids_are_checked() -> None:
    """An id in use, an unknown one, one that has finished, a parent of another prompt, a token that is missing."""
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=1))
    with pytest.raises(
        RequestError, match="'a' is added, and one of that id runs or waits: give each"
    ):
        scheduler.add(request("a"))
    with pytest.raises(RequestError, match="'b' cannot be aborted, as none of that id"):
        scheduler.abort("b")
    child = request("c", 5)
    child.parent = "a"
    with pytest.raises(RequestError, match="'c' has 'a' as its parent, which has another prompt"):
        scheduler.add(child)
    made = scheduler.schedule()
    with pytest.raises(RequestError, match="gave no token for request 'a'"):
        scheduler.update(made, {})
    scheduler.abort("a")
    with pytest.raises(RequestError, match="'a' cannot be aborted"):
        scheduler.abort("a")


def test_a_held_request_is_in_no_step() -> None:
    """Held requests hold up no other, keep their place, and may end, be withdrawn or start anew at any time."""
    scheduler = make_scheduler(budget=16)
    held = [request(name, 4, token=token) for token, name in enumerate("abcd", 1)]
    for each in held:
        scheduler.add(each)
        scheduler.hold(each)
    assert scheduler.only_holds
    scheduler.add(request("later", 4, token=9))
    assert not scheduler.only_holds
    assert counts(step(scheduler)) == {"later": 4}
    assert scheduler.num_waiting == 4
    scheduler.abort("a")
    scheduler.withdraw([held[1]])
    scheduler.release(held[0])
    scheduler.release(held[2])
    scheduler.release(held[2])
    scheduler.add(request("last", 4, token=8))
    assert list(counts(step(scheduler))) == ["later", "c", "last"]
    # The queues are thrown away: all wait, and a later release does nothing.
    scheduler.recover(None)
    scheduler.release(held[3])
    assert list(counts(step(scheduler))) == ["c", "d", "later", "last"]
    assert not scheduler.only_holds


def test_another_scheduler_goes_on_with_held_requests() -> None:
    """After a loss of workers, held requests wait in the new scheduler, in their order."""
    first, second = make_scheduler(budget=16), make_scheduler(budget=16)
    held = [request(name, 4, token=token) for token, name in enumerate("ab", 1)]
    for each in held:
        first.add(each)
        first.hold(each)
    second.hold_anew(first.requests)
    assert second.only_holds
    for each in reversed(held):
        second.release(each)
    assert list(counts(step(second))) == ["a", "b"]
