"""Each filter and adjustment against a plain reference in float64."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from engine.test_sampler import chi_square
from opgraft.engine.sampling import Sampler, SamplingBatch, bad_word_tokens, random_numbers
from opgraft.engine.sampling.drawing import Filters, draw, draw_filtered
from opgraft.engine.sampling.greatest_values import BLOCK
from opgraft.engine.sampling.penalties import Penalties
from opgraft.engine.sampling.random_numbers import noise_key
from opgraft.engine.sampling.row import SamplingRow
from opgraft.engine.sampling.token_counts import TokenCounts
from opgraft.engine.sampling_params import SamplingParams
from torch import Tensor


def reference(
    scaled: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Probabilities of one row after min-p, top-k and top-p, as their definitions say."""
    weights = [math.exp(value) for value in scaled.double().tolist()]
    least = min_p * max(weights)
    if top_k:
        least = max(least, sorted(weights, reverse=True)[min(top_k, len(weights)) - 1])
    weights = [weight if weight >= least else 0.0 for weight in weights]
    if top_p < 1:
        total, reached = math.fsum(weights), 0.0
        for token in sorted(range(len(weights)), key=lambda token: (-weights[token], token)):
            if reached >= top_p * total:
                weights[token] = 0.0
            else:
                reached += weights[token]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def filters_of(rows: int, **limits: Any) -> Filters:
    given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | limits
    return Filters.of(*([given[name]] * rows for name in given), torch.device("cpu"))


def in_favour_of(keys: Tensor, counters: Tensor) -> Tensor:
    """Numbers by which the token comes first that is the key, and its block, unless they have no weight."""
    favoured = (counters == keys) | (counters == ~(keys // BLOCK))
    return torch.ones(favoured.shape, dtype=torch.float64).masked_fill_(favoured, 1e-200)


def drawn(scaled: Tensor, tokens: Tensor, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Tensor:
    """What is drawn by numbers that favour each of some tokens: that very one, if it is kept."""
    monkeypatch.setattr(random_numbers, "exponentials", in_favour_of)
    rows, keys = scaled.expand(len(tokens), -1), tokens.unsqueeze(1)
    return (
        draw_filtered(rows, filters_of(len(tokens), **limits), keys) if limits else draw(rows, keys)
    )


def kept(scaled: Tensor, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> list[int]:
    """All tokens that can be drawn; the others give way to one of these."""
    tokens = torch.arange(scaled.shape[1])
    found = drawn(scaled, tokens, monkeypatch, **limits)
    itself = found == tokens
    assert set(found.tolist()) == set(tokens[itself].tolist())
    return tokens[itself].tolist()


LIMITS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 70},
    {"top_k": 100_000},
    {"top_p": 0.001},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 1.0},
    {"min_p": 0.2},
    {"min_p": 0.0001},
    {"top_k": 40, "top_p": 0.7},
    {"min_p": 0.01, "top_p": 0.7},
    {"top_k": 90, "top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("vocabulary", "spread"), [(1, 1.0), (37, 2.0), (64, 0.1), (300, 0.5), (300, 3.0)]
)
def test_filters_keep_what_their_definitions_say(
    limits: dict[str, Any], vocabulary: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a flat or a peaked distribution, in vocabularies below and above the number of candidates."""
    logits = (
        torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * spread
    )
    scaled = logits - logits.max()
    expected = reference(scaled[0], **limits)
    assert kept(scaled, monkeypatch, **limits) == [
        token for token, share in enumerate(expected) if share > 0
    ]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("vocabulary", "spread"), [(37, 2.0), (300, 0.5), (300, 3.0)])
def test_shares_are_those_of_their_definitions(
    limits: dict[str, Any], vocabulary: int, spread: float
) -> None:
    """Drawn 4,000 times, each token comes as often as it should, by a chi-square test."""
    logits = (
        torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * spread
    )
    scaled = (logits - logits.max()).expand(4000, -1)
    expected = torch.tensor(reference(scaled[0], **limits), dtype=torch.float64)
    keys = torch.tensor([noise_key(b"shares", position) for position in range(4000)]).unsqueeze(1)
    tokens = (
        draw_filtered(scaled, filters_of(4000, **limits), keys) if limits else draw(scaled, keys)
    )
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    assert not counts[expected == 0].any()
    if (expected * 4000 >= 5).sum() > 1:
        statistic, limit = chi_square(counts, expected)
        assert statistic < limit


@pytest.mark.parametrize(
    "limits",
    [{"top_p": 0.9}, {"min_p": 0.05, "top_p": 0.99}, {"top_k": 2500}, {"min_p": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("rounded", [False, True])
def test_filters_that_keep_thousands(
    limits: dict[str, Any], rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nuclei wider than any number of candidates, with many equal logits too, end at the right token."""
    logits = torch.randn(1, 5003, generator=torch.Generator().manual_seed(1))
    scaled = logits - logits.max()
    scaled = scaled.bfloat16().float() if rounded else scaled
    keep = {token for token, share in enumerate(reference(scaled[0], **limits)) if share > 0}
    assert len(keep) > 100
    order = scaled[0].sort(descending=True, stable=True).indices
    around = order[max(0, len(keep) - 60) : len(keep) + 60].sort().values  # where it ends
    found = drawn(scaled, around, monkeypatch, **limits)
    assert around[found == around].tolist() == [token for token in around.tolist() if token in keep]
    assert set(found.tolist()) <= keep


def test_equal_logits_at_the_end_of_a_nucleus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal tokens the nucleus keeps no more than it needs, the first ones; top-k keeps all that equal its last."""
    scaled = torch.zeros(1, 10)
    assert kept(scaled, monkeypatch, top_p=0.45) == [0, 1, 2, 3, 4]
    assert kept(scaled, monkeypatch, top_k=2) == list(range(10))
    assert kept(torch.zeros(1, 200), monkeypatch, top_p=0.5) == list(range(100))


def test_tokens_without_probability_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the numbers favour, tokens of -inf are passed over, in blocks and between them."""
    scaled = torch.full((1, 200), -math.inf)
    scaled[:, [70, 150]] = 0.0
    for limits in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.5}):
        assert kept(scaled, monkeypatch, **limits) == [70, 150]


def test_every_way_to_draw_gives_the_same_token() -> None:
    """By candidates and over the whole vocabulary, equal numbers give equal tokens where the filters keep all."""
    scaled = torch.randn(200, 1000, generator=torch.Generator().manual_seed(3))
    scaled -= scaled.amax(1, keepdim=True)
    keys = torch.arange(200).unsqueeze(1)
    for limits in ({"top_k": 1000}, {"top_p": 1 - 1e-12}, {"min_p": 1e-9}):
        assert (
            draw_filtered(scaled, filters_of(200, **limits), keys).tolist()
            == draw(scaled, keys).tolist()
        )


def adjusted(
    logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int], **more: Any
) -> Tensor:
    """The logits that a request samples from, as a processor of its own cannot see them: from its adjustments."""
    batch = SamplingBatch()
    batch.add("before", SamplingParams(), [1])
    batch.add("it", params, prompt, output[:-1], **more)
    rows = logits.repeat(2, 1)
    plan = batch.plan(logits.shape[1], logits.device)
    for token in output[-1:]:  # a token that comes when the tensors are made already
        plan.adjustments.apply(rows.clone())
        batch.append("it", token)
    assert batch.plan(logits.shape[1], logits.device) is plan
    assert plan.adjustments.apply(rows) == {}
    assert rows[0].equal(logits[0])
    return rows[1]


@pytest.mark.parametrize("output", [[], [4], [4, 4, 9, 4, 2], [2, 7, 7, 11]])
def test_penalties(output: list[int]) -> None:
    """Repetition over prompt and output, then frequency and presence over the output."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(2)) * 3
    params = SamplingParams(repetition_penalty=1.7, frequency_penalty=0.25, presence_penalty=-0.5)
    prompt = [0, 2, 2, 5, 99]  # the last is no token of the vocabulary: a placeholder
    expected = logits[0].double().tolist()
    for token in range(12):
        if token in prompt or token in output:
            expected[token] *= 1.7 if expected[token] < 0 else 1 / 1.7
        expected[token] -= 0.25 * output.count(token) + -0.5 * (token in output)
    assert adjusted(logits, params, prompt, output).tolist() == pytest.approx(expected, abs=1e-5)


def penalised(logits: Tensor, row: SamplingRow) -> Tensor:
    """The logits of a row, one token after the other."""
    params, found = row.params, logits.double().tolist()
    for token in range(len(found)):
        if params.repetition_penalty != 1 and token in [*row.prompt, *row.output]:
            found[token] *= params.repetition_penalty ** (1 if found[token] < 0 else -1)
        count = row.output.count(token)
        found[token] -= params.frequency_penalty * count + params.presence_penalty * bool(count)
    return torch.tensor(found, dtype=torch.float32)


def test_penalties_of_rows_that_come_and_go() -> None:
    """Whoever is added, selected, waits or leaves: each row has the penalties of its own tokens."""
    draw, batch, vocabulary = random.Random(5), SamplingBatch(), 12  # noqa: S311
    settings = [
        SamplingParams(repetition_penalty=1.7), SamplingParams(frequency_penalty=0.25, presence_penalty=-0.5),
        SamplingParams(), SamplingParams(repetition_penalty=0.6, presence_penalty=1.0),
    ]  # fmt: skip
    for turn in range(200):
        if draw.random() < 0.3 or not batch._all:
            batch.add(
                turn,
                draw.choice(settings),
                [draw.randrange(14) for _ in range(4)],
                [1] * draw.randrange(3),
            )
        if draw.random() < 0.2:
            batch.remove(draw.choice(list(batch._all)))
        if draw.random() < 0.5:
            batch.select(draw.sample(list(batch._all), draw.randint(0, len(batch._all))))
        logits = torch.randn(len(batch), vocabulary)
        expected = [penalised(row, each) for row, each in zip(logits, batch.rows, strict=True)]
        batch.plan(vocabulary, logits.device).adjustments.apply(logits)
        torch.testing.assert_close([*logits], expected, rtol=1e-5, atol=1e-5)
        for key in draw.sample(list(batch._all), min(3, len(batch._all))):
            batch.append(key, draw.randrange(14))


def test_tokens_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals and ends count no token of others anew, and a token of the output costs what is new about it."""
    counted: list[int] = []
    settled: list[int] = []
    made, settings = TokenCounts.__init__, Penalties._settings_of
    monkeypatch.setattr(
        TokenCounts,
        "__init__",
        lambda self, p, o, v: (counted.append(len(p)), made(self, p, o, v))[1],
    )
    monkeypatch.setattr(
        Penalties,
        "_settings_of",
        lambda self, rows: (settled.append(len(rows)), settings(self, rows))[1],
    )
    batch, logits = SamplingBatch(), torch.zeros(8, 5000)
    for key in range(8):
        batch.add(key, SamplingParams(repetition_penalty=1.1), range(2000))
    batch.plan(5000, logits.device).adjustments.apply(logits)
    assert counted == [2000] * 8
    settled.clear()
    for token in range(1990, 2010):
        for key in range(8):
            batch.append(key, token)
        batch.plan(5000, logits.device).adjustments.apply(logits)
    assert settled == [8] * 10
    batch.remove(3)
    batch.add(9, SamplingParams(repetition_penalty=1.1), range(10))
    batch.plan(5000, logits.device)
    assert counted == [2000] * 8 + [10]


def test_biases_are_added() -> None:
    """Each bias to its token; ids beyond the vocabulary concern nobody."""
    logits = torch.randn(1, 12)
    found = adjusted(logits, SamplingParams(logit_bias={3: 2.5, 0: -100.0, 50: 1.0}), [1], [])
    assert (found - logits[0]).tolist() == pytest.approx([-100, 0, 0, 2.5, *[0] * 8], abs=1e-4)


def test_biases_may_be_whole_numbers() -> None:
    """A bias of 2 is one of 2.0, and its request's neighbours are none the wiser."""
    batch = SamplingBatch()
    batch.add("whole", SamplingParams(temperature=0.0, logit_bias={3: 20}), [1])
    batch.add("neighbour", SamplingParams(temperature=0.0), [1])
    assert Sampler()(torch.arange(12.0).repeat(2, 1), batch).tokens.tolist() == [3, 11]


def banned(output: list[int], params: SamplingParams = SamplingParams(), **more: Any) -> list[int]:  # noqa: B008
    row = adjusted(torch.zeros(1, 12), params, [1, 5], output, **more)
    return row.isneginf().nonzero().flatten().tolist()


def test_bad_words_are_banned_where_they_would_end() -> None:
    """A word of one token always, one of several where the output, not the prompt, ends with its beginning."""
    words = {"bad_words": [(3,), (5, 6), (5, 7, 8)]}
    assert banned([], **words) == [3]
    assert banned([5], **words) == [3, 6]
    assert banned([2, 5, 7], **words) == [3, 8]
    assert banned([7], **words) == [3]


def test_min_tokens_holds_ends_back() -> None:
    """Until then neither the end of sequence nor a stop token can be sampled."""
    params = SamplingParams(min_tokens=2, stop_token_ids=(9,))
    assert banned([1], params, eos=[4]) == [4, 9]
    assert banned([1, 2], params, eos=[4]) == []
    assert banned([1], SamplingParams(min_tokens=2, ignore_eos=True), eos=[4]) == []


def test_processors_of_users() -> None:
    """They get the output, or prompt and output, and a copy of the logits; what they return counts."""
    seen: list[Any] = []

    def ban_all_but(output: list[int], logits: Tensor) -> Tensor:
        seen.append(output)
        return torch.full_like(logits, -math.inf).index_fill_(0, torch.tensor([6, 8]), 1.0)

    def raise_first(output: list[int], logits: Tensor, amount: float = 4.0) -> Tensor:
        logits[output[0]] += amount
        return logits

    def raise_by_prompt(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        logits[prompt[0]] += len(output)
        return logits

    params = SamplingParams(logits_processors=(ban_all_but, raise_first, raise_by_prompt))
    row = adjusted(torch.zeros(1, 12), params, [8], [2, 3])
    assert row[8] == 3
    assert row[6] == 1
    assert int(row.isfinite().sum()) == 2
    assert seen[-1] == [2, 3]


def test_a_processor_that_fails_fails_its_request() -> None:
    """An exception, a wrong shape, or no token left: the request has an error, the others their tokens."""

    def broken(output: list[int], logits: Tensor) -> Tensor:
        raise KeyError("where")

    processors = [
        broken,
        lambda output, logits: logits[:3],
        lambda output, logits: logits - math.inf,
    ]
    batch = SamplingBatch()
    for key, processor in enumerate(processors):
        batch.add(key, SamplingParams(logits_processors=(processor,)), [1])
    batch.add(3, SamplingParams(temperature=0.0), [1])
    sampled = Sampler()(torch.arange(12.0).repeat(4, 1), batch)
    assert set(sampled.errors) == {0, 1, 2}
    assert "raised KeyError: 'where'" in sampled.errors[0]
    assert "returned (3,), expected a tensor (12,)" in sampled.errors[1]
    assert "no token is left" in sampled.errors[2]
    assert sampled.tokens.tolist() == [-1, -1, -1, 11]


def test_bad_words_become_tokens() -> None:
    """With and without a space before them, each sequence once."""

    class Letters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return list(map(ord, text))

    assert bad_word_tokens([" ab", "ab", "c"], Letters()) == (
        (97, 98),
        (32, 97, 98),
        (99,),
        (32, 99),
    )
    assert bad_word_tokens(["\n", " "], Letters()) == (
        (10,),
        (32, 10),
        (32,),
        (32, 32),
    )  # not every space for a break
