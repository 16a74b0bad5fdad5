"""Guesses of the next tokens, and how many of them are verified."""

from __future__ import annotations

import logging
import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opgraft import SamplingParams
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import CacheConfig, ModelConfig, OpgraftConfig, SpeculationConfig
from opgraft.config.declaration import own_fields
from opgraft.engine.drafting.drafting import _METHODS, Drafting, drafting_of, proposer_of
from opgraft.engine.drafting.prompt_lookup import NOTED_AT_ONCE, PromptLookup
from opgraft.engine.drafting.proposer import Proposer
from opgraft.engine.drafting.shared_suffixes import SharedSuffixes
from opgraft.engine.drafting.step_times import StepTimes
from opgraft.engine.drafting.suffix_automaton import SuffixAutomaton
from opgraft.engine.request import Request
from opgraft.engine.runner.context_fit import ContextFit
from opgraft.engine.schedule.scheduler import Scheduler
from opgraft.errors import ConfigError, RequestError
from opgraft.testing.part_contracts import check_proposer
from support.scheduling import step
from support.simulated_runner import Traffic, make_scheduler

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=25), max_size=4)


class Told(Proposer):
    """Proposes the tokens that it was told, or raises in the place of that."""

    told: Sequence[int] | Exception = ()

    def propose(self, request: Request, most: int) -> Sequence[int]:
        if isinstance(self.told, Exception):
            raise self.told
        return self.told[:most]

    def forget(self, request: Request) -> None:
        if isinstance(self.told, Exception):
            raise self.told

    def forget_all(self) -> None:
        pass


def telling(scheduler: Scheduler, told: Sequence[int] | Exception) -> Scheduler:
    """A scheduler that drafts the same tokens for each request."""
    assert scheduler.drafting is not None
    scheduler.drafting.proposer = Told(scheduler.opgraft_config)
    scheduler.drafting.proposer.told = told  # type: ignore[attr-defined]
    return scheduler


def config(method: str = "ngram", **values: Any) -> OpgraftConfig:
    speculation = SpeculationConfig(method=method, **{"exact": False, **values})
    return OpgraftConfig(speculation=speculation).resolved()


def request(prompt: list[int], name: str = "a", salt: str | None = None) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=1000), cache_salt=salt)


def test_settings_name_the_methods() -> None:
    """Each choice of the setting has a proposer, and each proposer a choice."""
    assert own_fields(SpeculationConfig)["method"].bounds.choices == tuple(_METHODS)


def test_the_proposer_of_a_plugin_replaces_all() -> None:
    """With any method, drafts come from it. Without a method, nothing is drafted."""
    PluggableClass.register_oot(Told, name="proposer")
    try:
        for method in _METHODS:
            assert type(proposer_of(config(method))) is Told
        assert drafting_of(OpgraftConfig().resolved()) is None
    finally:
        PluggableClass.unregister_oot(Told)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_proposers_keep_their_contract(method: str) -> None:
    """Both propose as many tokens as are asked for at most, and change no request."""
    check_proposer(config(method))


def test_a_text_goes_on_as_before() -> None:
    """The longest known n-gram decides, its latest place counts, and a repetition goes on repeating."""
    proposer = PromptLookup(config())
    asked = request([1, 2, 3, 4, 5, 9, 3, 4, 7, 1, 2, 3, 4])
    assert proposer.propose(asked, 3) == [5, 9, 3]
    asked.append(7, 1000)
    assert proposer.propose(asked, 4) == [1, 2, 3, 4]
    assert proposer.propose(request([8, 6, 8, 6, 8], "b"), 5) == [6, 8, 6, 8, 6]
    assert list(proposer.propose(request([8, 6, 5], "c"), 5)) == []


@given(texts=TEXTS, last=st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_the_longest_part_of_any_text(texts: list[list[int]], last: list[int]) -> None:
    """The automaton finds the longest end of the last tokens that occurs in a text, and its place, in little memory."""
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.add(text)
    known = automaton.tokens
    guess = automaton.guess(last, len(known))
    expected = 0
    for length in range(1, len(last) + 1):
        end = last[-length:]
        if any(end == text[at : at + length] for text in texts for at in range(len(text))):
            expected = length
    assert guess.matched == expected
    if expected:
        place = len(known) - len(guess.tokens)
        assert known[place - expected : place] == last[-expected:]
    assert len(automaton._next) <= 2 * len(known) + 1


def test_answers_are_shared_within_a_salt() -> None:
    """What one request answered is proposed to another one of the same salt, and to no other."""
    proposer = SharedSuffixes(config("suffix"))
    answered = request([1], salt="tenant")
    answered.output = [5, 6, 7, 8, 9]
    proposer.forget(answered)
    assert proposer.propose(request([5, 6, 7], "b", "tenant"), 2) == [8, 9]
    for salt in (None, "other"):
        assert list(proposer.propose(request([5, 6, 7], f"to {salt}", salt), 2)) == []


def test_memory_is_bounded() -> None:
    """However many answers and salts there are, the memory has its limit, and the newest answer stays."""
    proposer = SharedSuffixes(config("suffix", remembered_tokens=100))
    draw = random.Random(1)  # noqa: S311
    for _ in range(200):
        answered = request([1], salt=f"salt {draw.randrange(9)}")
        answered.output = [draw.randrange(50) for _ in range(draw.randrange(1, 80))]
        proposer.forget(answered)
        assert sum(each.size for each in proposer._memories.values()) == proposer._size <= 100
        again = request(answered.output[-4:-1] or [1], salt=answered.cache_salt)
        if len(answered.output) > 4:
            assert list(proposer.propose(again, 1)) == answered.output[-1:]
        proposer._own.forget_all()


def test_long_salts_and_short_answers_take_no_more_memory() -> None:
    """Many salts with an answer of one token each stay below the bytes that the docs promise for tokens."""
    tokens = 20_000
    proposer = SharedSuffixes(config("suffix", remembered_tokens=tokens))
    tracemalloc.start()
    for number in range(5_000):
        answered = request([1], salt=f"{number}" * 5_000)
        answered.output = [number]
        proposer.forget(answered)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1_000 < len(proposer._memories) < 5_000
    assert used < 650 * tokens


def test_the_longer_match_decides() -> None:
    """A long match in the request beats a shorter one in an answer, or one at its end."""
    proposer = SharedSuffixes(config("suffix"))
    answered = request([1])
    answered.output = [14, 15, 16, 17, 18, 70]
    proposer.forget(answered)
    text = [*range(10, 19)]
    assert proposer.propose(request([*text, 60, *text], "b"), 1) == [60]
    assert proposer.propose(request([18, 60, *text[4:]], "c"), 1) == [70]
    answered.output = [*range(30, 40)]
    proposer.forget(answered)
    assert proposer.propose(request([38, 39, 60, *answered.output], "d"), 1) == [60]


def test_the_latest_place_in_answers_counts() -> None:
    """Of two answers that go on in another way, the newer one is proposed, after a part of both, too."""
    automaton = SuffixAutomaton()
    for text in ([1, 2, 3, 4], [5, 2, 3, 6]):
        automaton.add(text)
    assert automaton.guess([2, 3], 1).tokens == [6]


def test_long_prompts_are_noted_in_parts() -> None:
    """A step notes a part of a long prompt, and nothing is guessed before all of it is noted."""
    proposer = PromptLookup(config())
    asked = request([1, 2, 3] * NOTED_AT_ONCE)
    guesses = [list(proposer.propose(asked, 2)) for _ in range(3)]
    assert guesses == [[], [], [1, 2]]


def test_times_of_steps_are_a_line() -> None:
    """The share of a row comes from the times of steps, stays while steps are alike, and heeds no single slow step.

    Not even the first, which reads files.
    """
    times = StepTimes()
    assumed = times.share_of_row(1)
    for _ in range(100):
        times.add(1, 0.5)
    assert times.share_of_row(1) == assumed
    times = StepTimes()
    times.add(1, 1000.0)
    for number in range(45):
        rows = 1 + number % 9
        times.add(rows, 1.0 + 0.25 * rows)
    assert times.share_of_row(1) == pytest.approx(0.2, rel=0.05)
    times = StepTimes()
    for number in range(400):
        rows = 1 + number % 9
        times.add(rows, 1.0 + 0.25 * rows + 1000 * (number == 200))
    assert times.share_of_row(1) == pytest.approx(0.2, rel=0.05)
    for _ in range(1000):
        times.add(1, 1.25)
    assert times.share_of_row(1) == pytest.approx(0.2, rel=0.05)
    assert times.share_of_row(4) == pytest.approx(0.5, rel=0.05)


def _drafted(wrong: float, cost: float) -> list[int]:
    """The lengths of the drafts of a text that repeats itself but for a share of its tokens."""
    drafting = Drafting(config(max_tokens=6))
    drafting.times.ratio = cost
    draw = random.Random(2)  # noqa: S311
    asked = request([1, 2, 3, 4, 5, 6, 7, 8] * 3)
    lengths = []
    for number in range(300):
        lengths.append(len(drafting.draft(asked, 6, 1)))
        token = draw.randrange(100, 999) if draw.random() < wrong else 1 + number % 8
        asked.append(token, 10_000)
    return lengths


def test_drafts_are_as_long_as_they_pay() -> None:
    """Right guesses are drafted in full, wrong ones not at all, and a row that costs much makes drafts shorter."""
    assert _drafted(0, 0.1)[-1] == 6
    assert set(_drafted(1, 0.1)[50:]) == {0}
    cheap = sum(_drafted(0.3, 0.05)[50:])
    dear = sum(_drafted(0.3, 0.8)[50:])
    assert cheap > 2 * dear


def test_guesses_that_become_right_are_drafted_again() -> None:
    """Nothing is verified while guesses are wrong, and yet it is noticed when they are right."""
    drafting = Drafting(config(max_tokens=6))
    asked = request([1, 2])
    for number in range(100):
        # The same two tokens, and another one each time.
        drafting.draft(asked, 6, 1)
        for token in (20 + number, 1, 2):
            asked.append(token, 10_000)
    before = len(drafting.draft(asked, 6, 1))
    guessed = drafting._guessed["a"].tokens
    for number in range(100):
        drafting.draft(asked, 6, 1)
        asked.append(10 + number % 5, 10_000)
    assert before == 0 < len(guessed)
    assert len(drafting.draft(asked, 6, 1)) == 6


def test_tokens_that_are_not_those_of_the_draft_are_refused() -> None:
    """A runner that accepts other tokens than were drafted is an error, by which no request gets them."""
    scheduler = make_scheduler(drafts=3)
    scheduler.add(request([1, 1, 2]))
    driven = Traffic(scheduler, random.Random(1))  # noqa: S311
    while True:
        step = scheduler.schedule()
        assert step is not None
        tokens = driven.runner.execute(step)
        if step.sequences[0].draft:
            break
        scheduler.update(step, tokens, further=driven.runner.further)
    wrong = [(7, None), (7, None)]
    with pytest.raises(RequestError, match=r"tokens \[\d, 7, 7\] for request 'a' with the draft"):
        scheduler.update(step, {"a": tokens["a"]}, further={"a": wrong})


def test_nobody_gives_up_blocks_for_a_guess() -> None:
    """A draft is cut to the block of its request while others may need the free blocks."""
    scheduler = telling(make_scheduler(num_blocks=4, max_model_len=16, drafts=5), [5] * 5)
    scheduler._reserve = lambda: 0  # type: ignore[method-assign]  # so that all are admitted
    for name, length in (("a", 2), ("b", 4), ("c", 1)):
        scheduler.add(request([5] * length, name))
    step(scheduler)
    del scheduler._reserve
    made = scheduler.schedule()
    assert made is not None
    drafts = {each.request_id: len(each.draft) for each in made.sequences}
    assert drafts == {"a": 1, "b": 3, "c": 2}
    assert scheduler.counters.preemptions == scheduler.cache.pool.num_free == 0


@pytest.mark.parametrize("chunked", [True, False])
def test_prompts_come_before_drafts(chunked: bool) -> None:
    """While tokens of a prompt are missing, no draft takes their room in a step."""
    scheduler = telling(make_scheduler(drafts=7, budget=16, chunked=chunked), [5] * 7)
    scheduler.add(request([5] * 2, "a"))
    step(scheduler)
    scheduler.add(request([5] * (20 if chunked else 15), "b"))
    counts = []
    for _ in range(3):
        made = step(scheduler)
        counts.append({each.request_id: each.count for each in made.sequences})
    if chunked:
        assert counts == [{"a": 1, "b": 15}, {"a": 1, "b": 5}, {"a": 8, "b": 7}]
    else:
        assert counts[:2] == [{"a": 1, "b": 15}, {"a": 8, "b": 7}]


def test_no_draft_outgrows_a_rotation() -> None:
    """Keys behind a length are rotated in another way, so drafts that would go beyond it are left out."""
    scheduler = telling(make_scheduler(drafts=5), [5] * 5)
    scheduler.context_ropes = [ContextFit(trained=12, gradual=False)]
    scheduler.add(request([5] * 5))
    step(scheduler)
    lengths = [len(step(scheduler).sequences[0].draft) for _ in range(3)]
    assert lengths == [5, 5, 0]


def test_guesses_end_before_unknown_tokens() -> None:
    """A number that is no token of the vocabulary ends a guess, so the step has none."""
    scheduler = telling(make_scheduler(drafts=5), [7, 9, 10, 3])
    assert scheduler.drafting is not None
    scheduler.drafting.vocab_size = 10
    scheduler.add(request([5]))
    step(scheduler)
    made = scheduler.schedule()
    assert made is not None
    assert made.sequences[0].draft == (7, 9)


def test_a_proposer_that_fails_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """Its error is logged once, and requests get their tokens without drafts."""
    scheduler = telling(make_scheduler(drafts=5), ValueError("no idea"))
    scheduler.add(request([5]))
    with caplog.at_level(logging.ERROR, "opgraft"):
        for _ in range(4):
            step(scheduler)
        scheduler.abort("a")
    assert caplog.text.count("the proposer Told failed: ValueError: no idea") == 1
    assert scheduler.counters.drafts == 0


def test_bits_are_promised_or_given_up() -> None:
    """Drafts need kernels that compute rows alike, unless the settings say that bits may differ."""
    with pytest.raises(
        ConfigError, match=r"model\.batch_invariant to true, and tokens have the same"
    ):
        OpgraftConfig(speculation=SpeculationConfig(method="ngram")).resolved()
    for model in ({"batch_invariant": True}, {}):
        speculation = SpeculationConfig(method="suffix", exact=bool(model))
        made = OpgraftConfig(
            model=ModelConfig(**model), cache=CacheConfig(), speculation=speculation
        )
        assert made.resolved().speculation.method == "suffix"
