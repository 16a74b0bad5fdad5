"""The sampler: greedy and drawn tokens, their distribution, and what one request has to do with another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import opgraft.binding.pluggable_class as pluggable
import pytest
import torch
from opgraft.engine.sampling import Sampler, SamplingBatch, TokenLogprobs, prompt_logprobs
from opgraft.engine.sampling.greatest_values import FEW, row_maximum
from opgraft.engine.sampling.logprobs import token_logprobs
from opgraft.engine.sampling.random_numbers import exponentials, noise_key, stream_of
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import RequestError
from torch import Tensor

GREEDY = SamplingParams(temperature=0.0)
MIXED = [
    GREEDY,
    SamplingParams(),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=7, temperature=0.7),
    SamplingParams(min_p=0.05, seed=11),
    SamplingParams(top_p=0.5, top_k=100, min_p=0.001),
    SamplingParams(temperature=5.0, top_p=0.95),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.3),
]


def batch_of(
    params: Sequence[SamplingParams], prompt: Sequence[int] = (1, 2, 3), first: int = 0
) -> SamplingBatch:
    """A batch whose keys are 'first', 'first' + 1 and so on, which are the numbers of arrival too."""
    batch = SamplingBatch()
    for index, each in enumerate(params, first):
        batch.add(index, each, prompt, arrival=index)
    return batch


def normal(rows: int, vocabulary: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 1000, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_the_likeliest(vocabulary: int, dtype: torch.dtype) -> None:
    """Greedy tokens are those of argmax in float32, ties included, for odd sizes and half types."""
    logits = normal(9, vocabulary, 0.5).to(dtype)
    expected = logits.float().numpy().argmax(-1)  # of numpy's ties the first wins
    sampled = Sampler()(logits, batch_of([GREEDY] * 9))
    assert sampled.tokens.dtype == torch.int64
    assert sampled.tokens.tolist() == expected.tolist()
    assert not sampled.errors
    assert not sampled.logprobs


def test_a_greedy_batch_changes_and_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all is greedy, no number is drawn and the logits are not written to."""
    monkeypatch.setattr(
        SamplingBatch, "noise_keys", lambda *_: pytest.fail("a random number for a greedy request")
    )
    logits = normal(3, 100)
    before = logits.clone()
    Sampler()(logits, batch_of([GREEDY] * 3))
    Sampler()(logits, batch_of([SamplingParams(temperature=0.0, logit_bias={3: 50.0})] * 3))
    assert logits.equal(before)


def test_an_empty_batch_gives_no_tokens() -> None:
    """No rows, no tokens, whatever is in the batch but not selected."""
    batch = batch_of([GREEDY, SamplingParams()])
    batch.select(())
    sampled = Sampler()(torch.empty(0, 50), batch)
    assert sampled.tokens.shape == (0,)
    assert sampled.tokens.dtype == torch.int64


@pytest.mark.parametrize("count", [FEW, FEW + 1])
def test_the_maximum_of_rows_is_that_of_torch(count: int) -> None:
    """Blocks change neither value nor position, with NaN and -inf too."""
    rows = normal(count, 129)
    rows[1, 100] = math.nan
    rows[2] = -math.inf
    rows[3, 128] = math.inf
    values, positions = row_maximum(rows)
    expected = rows.max(-1)
    assert torch.equal(values.nan_to_num(7.0), expected.values.nan_to_num(7.0))
    assert positions.tolist() == expected.indices.tolist()


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, float]:
    """The statistic over outcomes expected five times or more, and a limit that a fair one passes once in 10,000."""
    drawn = counts.sum()
    large = probabilities * drawn >= 5
    expected = torch.cat((probabilities[large], probabilities[~large].sum(0, keepdim=True))) * drawn
    observed = torch.cat((counts[large], counts[~large].sum(0, keepdim=True)))
    used = expected > 0
    freedom = int(used.sum()) - 1
    statistic = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    return statistic, freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("limits", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.02}])
def test_tokens_are_distributed_as_they_should(temperature: float, limits: dict[str, Any]) -> None:
    """20,000 tokens of fixed seeds fit the exact distribution by a chi-square test."""
    logits = normal(1, 150, 1.0)
    params = [SamplingParams(temperature=temperature, seed=seed, **limits) for seed in range(4000)]
    batch = batch_of(params)
    counts = torch.zeros(150, dtype=torch.float64)
    for _ in range(5):
        tokens = Sampler()(logits.expand(4000, -1), batch).tokens
        counts += torch.bincount(tokens, minlength=150)
        for key, token in enumerate(tokens.tolist()):
            batch.append(key, token)
    exact = (logits[0].double() / temperature).softmax(-1)
    if "top_k" in limits:
        exact[exact < exact.topk(12).values[-1]] = 0
    if "top_p" in limits:
        order = exact.argsort(descending=True)
        exact[order[exact[order].cumsum(0) - exact[order] >= 0.8]] = 0
    exact[exact < limits.get("min_p", 0) * exact.max()] = 0
    assert not counts[exact == 0].any()
    statistic, limit = chi_square(counts, exact / exact.sum())
    assert statistic < limit


def test_random_numbers_are_uniform_and_independent() -> None:
    """Numbers of neighbouring seeds, positions and tokens fill (0, 1) evenly, and pairs of them the square."""
    keys = torch.tensor(
        [[noise_key(stream_of(seed, 0), at) for at in range(20)] for seed in range(40)]
    )
    counters = torch.arange(-10, 15)
    cube = (-exponentials(keys.reshape(-1, 1), counters)).exp().reshape(40, 20, 25)
    assert float(cube.min()) > 0
    assert float(cube.max()) < 1
    even = torch.full((64,), 1 / 64, dtype=torch.float64)
    for axis, size in enumerate(cube.shape):
        pairs = cube.narrow(axis, 0, size - 1), cube.narrow(axis, 1, size - 1)
        cells = ((pairs[0] * 8).long() * 8 + (pairs[1] * 8).long()).flatten()
        statistic, limit = chi_square(torch.bincount(cells, minlength=64).double(), even)
        assert statistic < limit
    assert noise_key(stream_of(3, 9), 5) == noise_key(stream_of(3, 1), 5), (
        "a seed makes the arrival unimportant"
    )
    assert noise_key(stream_of(None, 3), 5) != noise_key(stream_of(3, 0), 5), (
        "arrivals are no seeds"
    )


def test_numbers_of_a_key_are_the_same_on_every_machine() -> None:
    """They are those of SplitMix64, computed here without tensors, whatever the sign of key and counter."""

    def expected(key: int, counter: int) -> float:
        state = (key + counter * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return -math.log(((state >> 12) + 0.5) / 2**52)

    keys, counters = [0, 5, -(2**63), 2**63 - 1], [-800, -1, 0, 1, 49_151]
    found = exponentials(torch.tensor(keys).unsqueeze(1), torch.tensor(counters)).flatten().tolist()
    assert found == pytest.approx(
        [expected(key, counter) for key in keys for counter in counters], rel=1e-12
    )


@pytest.mark.parametrize(
    ("spread", "limits"),
    [(0.3, {}), (3.0, {}), (3.0, {"top_k": 40}), (3.0, {"top_p": 0.95}), (3.0, {"min_p": 0.001})],
)
def test_rounding_of_logits_changes_few_draws(spread: float, limits: dict[str, Any]) -> None:
    """Logits that differ by 0.01 give other tokens to few of 500 seeds, over flat and peaked distributions."""
    logits = normal(1, 5003, spread)
    params = [SamplingParams(seed=seed, **limits) for seed in range(500)]
    tokens = Sampler()(logits.expand(500, -1), batch_of(params)).tokens
    nearly = logits + 0.01 * normal(500, 5003, 1.0, seed=1)
    changed = int((Sampler()(nearly, batch_of(params)).tokens != tokens).sum())
    assert changed <= 15


def tokens_of(
    params: Sequence[SamplingParams], logits: Tensor, keys: Sequence[int], steps: int = 4
) -> dict[Any, list]:
    """Sample some steps of the requests that are named, in their order, each from its own row of the logits."""
    batch = SamplingBatch()
    for key in keys:
        batch.add(key, params[key], [key, 2], arrival=key)
    found: dict[Any, list] = {key: [] for key in keys}
    for step in range(steps):
        sampled = Sampler()(logits[step, list(keys)], batch)
        for key, token in zip(keys, sampled.tokens.tolist(), strict=True):
            found[key].append(token)
            batch.append(key, token)
    return found


@pytest.mark.parametrize("vocabulary", [97, 4999])
def test_a_request_does_not_depend_on_its_neighbours(vocabulary: int) -> None:
    """Each request gets the same tokens alone, with others, and in any order of the batch."""
    params = MIXED * 3
    logits = normal(4 * len(params), vocabulary, 2.0).unflatten(0, (4, len(params)))
    together = tokens_of(params, logits, range(len(params)))
    assert tokens_of(params, logits, range(len(params) - 1, -1, -1)) == together
    assert tokens_of(params, logits, [5, 1, 17, 6]) == {key: together[key] for key in (5, 1, 17, 6)}
    for key in range(len(params)):
        assert tokens_of(params, logits, [key]) == {key: together[key]}


def test_a_request_goes_on_where_it_was_preempted() -> None:
    """A request that is removed and added with its output gets the tokens that it would have got."""
    logits = normal(6, 5000, 2.0)
    for params in MIXED:
        straight, resumed = batch_of([params]), batch_of([params])
        tokens = []
        for step in range(6):
            tokens.append(int(Sampler()(logits[step : step + 1], straight).tokens))
            straight.append(0, tokens[-1])
        for step in range(6):
            if step == 3:
                resumed.remove(0)
                resumed.add(0, params, [1, 2, 3], tokens[:3], arrival=0)
            assert int(Sampler()(logits[step : step + 1], resumed).tokens) == tokens[step]
            resumed.append(0, tokens[step])


def test_rows_can_be_selected_for_a_step() -> None:
    """Requests that wait keep their place and their random numbers."""
    logits = normal(3, 500)
    batch = batch_of([SamplingParams()] * 3)
    expected = Sampler()(logits, batch).tokens.tolist()
    batch.select([2, 0])
    assert batch.keys == (2, 0)
    assert Sampler()(logits[[2, 0]], batch).tokens.tolist() == [expected[2], expected[0]]
    batch.select([0, 1, 2])
    assert Sampler()(logits, batch).tokens.tolist() == expected


def test_arrivals_and_ends_are_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are put together when a step asks for them, not with each request that comes or goes."""
    shown: list[int] = []
    show = SamplingBatch._show
    monkeypatch.setattr(
        SamplingBatch, "_show", lambda self, keys: (shown.append(len(keys)), show(self, keys))[1]
    )
    batch = batch_of([GREEDY] * 50)
    for key in range(20):
        batch.remove(key)
    assert shown == []
    batch.select(range(25, 50))
    batch.select(range(25, 50))
    assert shown == [25]
    batch.add(99, GREEDY, [1])
    assert batch.keys == (*range(20, 50), 99)


def damaged(vocabulary: int) -> Tensor:
    logits = normal(len(MIXED), vocabulary)
    logits[1, 5] = math.nan
    logits[2] = -math.inf
    logits[4, 0] = math.inf
    logits[7] = math.nan
    return logits


@pytest.mark.parametrize("vocabulary", [70, 4999])
def test_bad_logits_fail_one_request_by_name(vocabulary: int) -> None:
    """NaN, +inf or nothing but -inf: the row has an error that says so, and its neighbours their tokens."""
    expected = Sampler()(normal(len(MIXED), vocabulary), batch_of(MIXED)).tokens.tolist()
    sampled = Sampler()(damaged(vocabulary), batch_of(MIXED))
    assert set(sampled.errors) == {1, 2, 4, 7}
    assert sampled.errors[1].startswith(f"1 of {vocabulary} logits are NaN")
    assert sampled.errors[2].startswith(f"all of {vocabulary} logits are -inf")
    assert "infinite" in sampled.errors[4]
    good = [0, 3, 5, 6]
    assert [sampled.tokens[row] for row in good] == [expected[row] for row in good]
    assert sampled.tokens[[1, 2, 4, 7]].tolist() == [-1] * 4


def test_a_batch_without_rows_for_the_logits_is_refused() -> None:
    """The number of rows must fit, and each request is known by one key."""
    batch = batch_of([GREEDY])
    with pytest.raises(
        RequestError, match=r"logits \(2, 9\) for a batch of 1 requests: give \[1, vocabulary\]"
    ):
        Sampler()(torch.zeros(2, 9), batch)
    with pytest.raises(RequestError, match="request 0 is in the batch already"):
        batch.add(0, GREEDY, [1])
    with pytest.raises(RequestError, match="the batch has no request 'x'"):
        batch.remove("x")
    with pytest.raises(RequestError, match="the batch has no request 'x'"):
        batch.select(["x"])
    with pytest.raises(RequestError, match="bad words without their tokens"):
        batch.add(1, SamplingParams(bad_words=("no",)), [1])


def test_log_probabilities_are_the_models() -> None:
    """They come from the raw logits, before temperature and bans, with rank and as many of the likeliest as asked."""
    logits = normal(3, 40).bfloat16()
    params = [
        SamplingParams(temperature=0.0, logprobs=3, logit_bias={7: 100.0}),
        SamplingParams(temperature=2.0, logprobs=0),
        SamplingParams(),
    ]
    sampled = Sampler()(logits, batch_of(params))
    exact = logits.double().log_softmax(-1)
    assert set(sampled.logprobs) == {0, 1}
    first = sampled.logprobs[0]
    assert first.token == 7
    assert first.logprob == pytest.approx(float(exact[0, 7]), abs=1e-5)
    assert first.rank == int((exact[0] >= exact[0, 7]).sum())
    assert [token for token, _ in first.top] == exact[0].argsort(descending=True)[:3].tolist()
    assert [value for _, value in first.top] == pytest.approx(
        exact[0].sort(descending=True).values[:3].tolist(), abs=1e-5
    )
    assert sampled.logprobs[1].top == ()


def test_log_probabilities_of_a_prompt_come_by_chunks() -> None:
    """Chunks of any size give what the whole prompt gives: one entry for each token but the first."""
    prompt = [3, 1, 4, 1, 5]
    logits = normal(5, 20)
    whole = prompt_logprobs(logits, prompt, 0, 2)
    assert [entry.token for entry in whole] == prompt[1:]
    chunks = [
        *prompt_logprobs(logits[:2], prompt, 0, 2),
        *prompt_logprobs(logits[2:], prompt, 2, 2),
    ]
    assert chunks == whole
    assert prompt_logprobs(logits[4:], prompt, 4, 2) == []
    assert all(isinstance(entry, TokenLogprobs) and len(entry.top) == 2 for entry in whole)
    assert len(prompt_logprobs(logits, prompt, 0, 50)[0].top) == 20, "more than there are gives all"


def test_the_sampler_can_be_replaced() -> None:
    """It is registered as 'sampler', so that a plugin can bring another."""
    assert pluggable.choose_class(Sampler).cls is Sampler
    assert pluggable.op_name_of(Sampler, pluggable.host_state()) == "sampler"


def test_neighbours_do_not_choose_among_equal_tokens() -> None:
    """Of tokens that are equally likely, a row has the same ones alone and beside other counts."""
    counts = [0, 1, 2, 5] * 8
    logits = torch.randint(0, 6, (len(counts), 4_000)).float()
    tokens = torch.zeros(len(counts), dtype=torch.int64)
    together = token_logprobs(logits, tokens, counts)
    for row, count in enumerate(counts):
        alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], [count])
        assert together[row] == alone[0]
