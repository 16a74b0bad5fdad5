"""Contracts of executor, worker, model runner, sampler, proposer, memory query and step graph.

Tests of a plugin call the checks, with the plugin active, like those of ``contracts``. A broken
contract is an ``AssertionError``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opgraft.config import OpgraftConfig
from opgraft.engine.drafting.drafting import proposer_of
from opgraft.engine.request import Request
from opgraft.engine.runner.cache_layout import CacheSizes
from opgraft.engine.runner.memory_query import MemoryQuery
from opgraft.engine.runner.model_runner import ModelRunner
from opgraft.engine.runner.step_program import StepGraph
from opgraft.engine.sampling import SampledTokens, Sampler, SamplingBatch
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.step import NewSequence, ScheduledPart, Step, StepResult
from opgraft.engine.workers.executors import executor_of
from opgraft.engine.workers.worker import Worker
from opgraft.errors import ConfigError, EngineError, RequestError
from opgraft.plugins.selection import current_platform
from torch import Tensor

VOCABULARY = 8
"""The number of tokens that samplers choose from."""

DRAWS, MOST_DEVIATION = 4000, 40.0
"""Tokens drawn of one distribution, and the limit of chi-square.

Chance alone exceeds the limit once in a million times.
"""

GREEDY = SamplingParams(temperature=0, max_tokens=9)

BLOCKS, STATES, NEW = 64, 4, 3
"""Blocks and states of the cache, and tokens of an answer."""

PROMPTS: Mapping[str, tuple[int, ...]] = {
    "long": (5, 9, 3, 17, 4, 8, 21, 6, 13),
    "short": (7, 11, 4),
}


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def check_sampler(
    make: Callable[[], Sampler] = Sampler, device: torch.device | str = "cpu"
) -> None:
    """Check that a sampler chooses as requests ask: the likeliest token, drawn or banned tokens.

    A row that cannot be sampled must fail alone.

    Args:
        make: constructs the sampler.
        device: of the logits.
    """
    sampler = make()
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, VOCABULARY, generator=generator).to(device)
    # The engine may use the logits after sampling.
    before = logits.clone()
    greedy = _sampled(sampler, logits, [GREEDY] * 3)
    _expect(torch.equal(logits, before), "the sampler wrote to the logits that it was given")
    _expect(greedy.tokens.dtype == torch.int64, f"tokens are {greedy.tokens.dtype}, expected int64")
    likeliest = logits.argmax(-1).tolist()
    _expect(greedy.tokens.tolist() == likeliest, "temperature 0 did not take the likeliest tokens")
    params = SamplingParams(temperature=0, logit_bias={2: 100.0}, logprobs=1)
    biased = _sampled(sampler, logits, [params] * 3)
    _expect(biased.tokens.tolist() == [2] * 3, "logit_bias did not change what is chosen")
    _check_logprobs(biased, logits)
    _check_draws(sampler, logits[:1])
    _check_failures(sampler, logits, likeliest)


def _sampled(sampler: Sampler, logits: Tensor, params: Sequence[SamplingParams]) -> SampledTokens:
    batch = SamplingBatch()
    for key, each in enumerate(params):
        batch.add(key, each, (1, 2), arrival=key)
    found: SampledTokens = sampler(logits, batch)
    return found


def _check_logprobs(found: SampledTokens, logits: Tensor) -> None:
    expected = logits.float().log_softmax(-1)
    for row, token in enumerate(found.tokens.tolist()):
        told = found.logprobs[row]
        _expect(
            told.token == token,
            f"log-probabilities of row {row} are of token {told.token}, not of {token}",
        )
        error = abs(told.logprob - float(expected[row, token]))
        _expect(
            error < 1e-4,
            f"the log-probability of row {row} is {told.logprob}, not that of the logits as they "
            "were given",
        )


def _check_draws(sampler: Sampler, logits: Tensor) -> None:
    """Check the distribution of draws, and that a request has the same draws in any batch."""
    params = [SamplingParams(temperature=0.7, seed=seed) for seed in range(DRAWS)]
    repeated = logits.expand(DRAWS, -1)
    tokens = _sampled(sampler, repeated, params).tokens
    shares = (logits[0].cpu().double() / 0.7).softmax(-1)
    expected = DRAWS * shares
    found = torch.bincount(tokens.cpu(), minlength=VOCABULARY)
    deviations = (found - expected) ** 2 / expected
    chi_square = float(deviations.sum())
    _expect(
        chi_square < MOST_DEVIATION,
        f"tokens drawn are {found.tolist()}, expected about {expected.round().tolist()}",
    )
    # The seed alone decides, and never the batch.
    alone = [int(_sampled(sampler, logits, [each]).tokens) for each in params[:20]]
    _expect(
        tokens[:20].tolist() == alone, "a seeded request has other tokens beside others than alone"
    )
    _check_filter(sampler, logits)


def _check_filter(sampler: Sampler, logits: Tensor) -> None:
    # A high temperature makes tokens beyond the filter likely.
    few = [SamplingParams(temperature=2.0, top_k=2, seed=seed) for seed in range(50)]
    kept = set(_sampled(sampler, logits.expand(50, -1), few).tokens.tolist())
    allowed = set(logits[0].topk(2).indices.tolist())
    _expect(kept <= allowed, f"top_k=2 let the tokens {sorted(kept)} through")


def _check_failures(sampler: Sampler, logits: Tensor, right: list[int]) -> None:
    """Check that a row of NaN fails alone, and that logits for too many rows are refused."""
    spoilt = logits.index_fill(0, torch.tensor([1], device=logits.device), torch.nan)
    found = _sampled(sampler, spoilt, [GREEDY] * 3)
    failed = set(found.errors)
    _expect(
        failed == {1}, f"logits of row 1 are NaN, and the rows {sorted(map(str, failed))} failed"
    )
    _expect(
        found.tokens.tolist() == [right[0], -1, right[2]],
        "a row that failed is to be -1, and to harm no other",
    )
    try:
        _sampled(sampler, logits, [GREEDY] * 2)
    except RequestError:
        return
    raise AssertionError("three rows of logits for two requests were taken: that is a RequestError")


def _expect_same_in_other_steps(
    hand: _Hand, whole: Mapping[str, Sequence[int]], *, copies: bool
) -> None:
    """Check that prompts in chunks, and behind a copied prefix, have the tokens of whole prompts.

    Args:
        hand: computes steps.
        whole: the tokens of each prompt alone.
        copies: try the copied prefix. States are not in blocks, so a copy of blocks has no state.
    """
    # Chunks of 4 tokens end within the prompts.
    together = hand.answer(PROMPTS, chunk=4)
    _expect(
        together == whole,
        f"prompts in chunks beside each other have the tokens {together}, alone {whole}",
    )
    if not copies:
        return
    copied = hand.answer_behind_copy(PROMPTS["long"])
    _expect(
        copied == whole["long"],
        f"behind a prefix that was copied the tokens are {copied}, not {whole['long']}",
    )


def check_model_runner(
    given: OpgraftConfig, expected: Mapping[str, Sequence[int]] | None = None
) -> dict[str, list[int]]:
    """Check that a model runner follows each ``Step``. No scheduler takes part.

    A prompt has the same tokens in one piece, in chunks beside another prompt, and behind a copied
    prefix. A removed sequence is forgotten, so that another one may have the name and the blocks.

    Args:
        given: names a decoder.
        expected: the tokens of the prompts from another runner, such as one without the plugin; by
            default not compared.

    Returns:
        The tokens of each prompt.
    """
    config = given.resolved()
    device = config.load.device or current_platform().device_type
    runner = ModelRunner(config, torch.device(device))
    runner.load_model()
    runner.allocate_cache(BLOCKS, STATES if runner.layout.states else 0)
    runner.compile_model()
    hand = _Hand(runner.execute, len(runner.layout.groups), runner.layout.block_size)
    whole = {name: hand.answer({name: prompt})[name] for name, prompt in PROMPTS.items()}
    _expect_same_in_other_steps(hand, whole, copies=not runner.layout.states)
    if expected is not None:
        wanted = {name: [*tokens] for name, tokens in expected.items()}
        _expect(whole == wanted, f"tokens are {whole}, not {expected}")
    return whole


class _Hand:
    """Makes steps by hand.

    Args:
        execute: computes a step.
        kinds: the number of block tables of a sequence.
        block_size: tokens in a block.
    """

    def __init__(self, execute: Callable[[Step], StepResult], kinds: int, block_size: int) -> None:
        self._execute = execute
        self._kinds = kinds
        self._size = block_size

    def _blocks(self, place: int, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Return the block tables of a sequence; the blocks are its own, and scattered."""
        longest = max(map(len, PROMPTS.values())) + NEW
        count = -(-tokens // self._size)
        most = -(-longest // self._size)
        tables = []
        for kind in range(self._kinds):
            first = (place * self._kinds + kind) * most
            tables.append(tuple(5 * (first + number) % BLOCKS for number in range(count)))
        return tuple(tables)

    def _new(self, name: str, prompt: Sequence[int], place: int) -> NewSequence:
        tokens = tuple(prompt)
        longest = len(tokens) + NEW
        blocks = self._blocks(place, longest)
        return NewSequence(name, tokens, len(tokens), longest, GREEDY, blocks, place, state=place)

    def _scheduled(
        self, name: str, start: int, count: int, samples: bool = True, token: int | None = None
    ) -> ScheduledPart:
        """Schedule tokens of a sequence that needs no new blocks."""
        return ScheduledPart(name, start, count, ((),) * self._kinds, samples, token)

    def _computed(self, step: Step) -> dict[str, int]:
        result = self._execute(step)
        wanted = {each.request_id for each in step.sequences if each.samples}
        found = dict(result.tokens)
        _expect(not result.errors, f"sequences failed: {result.errors}")
        _expect(
            found.keys() == wanted,
            f"tokens are of {sorted(found)}, and the step samples {sorted(wanted)}",
        )
        return found

    def _all_new(self, prompts: Mapping[str, Sequence[int]]) -> tuple[NewSequence, ...]:
        """Return the sequences of all prompts."""
        # Each gets blocks of its own, by its place.
        places = enumerate(prompts.items())
        return tuple(self._new(name, prompt, place) for place, (name, prompt) in places)

    def answer(
        self, prompts: Mapping[str, Sequence[int]], chunk: int = 1 << 30
    ) -> dict[str, list[int]]:
        """Compute prompts beside each other, in chunks of some tokens, and the next tokens."""
        added = self._all_new(prompts)
        states = tuple((None, each.state) for each in added)
        done = dict.fromkeys(prompts, 0)
        outputs: dict[str, list[int]] = {name: [] for name in prompts}
        while unfinished := [name for name, tokens in outputs.items() if len(tokens) < NEW]:
            batch = []
            for name in unfinished:
                length = len(prompts[name])
                part = self._part(name, length, done[name], chunk, outputs[name])
                done[name] += part.count
                batch.append(part)
            computed = self._computed(Step((), added, (), tuple(batch), states))
            for name, token in computed.items():
                outputs[name].append(token)
            # Sequences are new in the first step only.
            added = ()
            states = ()
        self._execute(Step(tuple(prompts), (), (), ()))
        return outputs

    def _part(
        self, name: str, prompt: int, done: int, chunk: int, output: Sequence[int]
    ) -> ScheduledPart:
        """Schedule the next chunk of a prompt, or the last token of the output."""
        # Behind the prompt, a step computes the token of the step before.
        left = max(1, prompt - done)
        count = min(chunk, left)
        samples = done + count >= prompt
        token = output[-1] if output else None
        return self._scheduled(name, done, count, samples, token)

    def answer_behind_copy(self, prompt: Sequence[int]) -> list[int]:
        """Compute a prompt, copy the first blocks to another sequence, and answer from there."""
        length = len(prompt)
        # Other tokens lie in the second sequence's blocks, for a runner that does not copy to read.
        earlier = self._new("earlier", prompt[::-1], 1)
        reversed_whole = self._scheduled("earlier", 0, length)
        self._computed(Step((), (earlier,), (), (reversed_whole,)))
        self._execute(Step(("earlier",), (), (), ()))
        first = self._new("first", prompt, 0)
        second = self._new("second", prompt, 1)
        whole = self._scheduled("first", 0, length)
        self._computed(Step((), (first,), (), (whole,)))
        # The last token is computed anew, for the logits.
        shared = (length - 1) // self._size
        copies = _copies_of(first, second, shared)
        start = shared * self._size
        rest = self._scheduled("second", start, length - start)
        # The same step removes the first sequence: its blocks must be copied before.
        found = [self._only_token(Step(("first",), (second,), copies, (rest,)))]
        for number in range(NEW - 1):
            following = self._scheduled("second", length + number, 1, token=found[-1])
            found.append(self._only_token(Step((), (), (), (following,))))
        self._execute(Step(("second",), (), (), ()))
        return found

    def _only_token(self, step: Step) -> int:
        (token,) = self._computed(step).values()
        return token


def _copies_of(first: NewSequence, second: NewSequence, count: int) -> tuple[tuple[int, int], ...]:
    """Return pairs of blocks to copy, for some first blocks of each table of a sequence."""
    copies: list[tuple[int, int]] = []
    for ours, theirs in zip(first.blocks, second.blocks, strict=True):
        copies += zip(ours[:count], theirs[:count], strict=True)
    return tuple(copies)


def check_worker(given: OpgraftConfig) -> None:
    """Check that a worker prepares the device, tells the memory, and computes a step.

    Everything that the worker tells can be sent to another process.

    Args:
        given: names a decoder, and leaves the size of the cache open.
    """
    config = given.resolved()
    # The engine asks this before any process starts.
    Worker.expect_split(config.parallel)
    worker = Worker(config, 0, 1)
    worker.init_device()
    sizes = worker.load_model()
    _expect(
        isinstance(sizes, CacheSizes),
        f"load_model returned {type(sizes).__name__}: it is to return CacheSizes",
    )
    _expect(
        worker.group_cache(sizes.windows) == sizes,
        "groups of the windows that there are changed the cache",
    )
    room = worker.cache_bytes()
    _expect(
        type(room) is int and room > 0,
        f"cache_bytes returned {room!r}: it is to return bytes, as an integer",
    )
    try:
        worker.expect_memory(1 << 50, 0)
    except ConfigError:
        pass
    else:
        fault = f"expect_memory took a cache of {1 << 50} blocks"
        raise AssertionError(f"{fault}: that is a ConfigError")
    worker.allocate_cache(BLOCKS, STATES if sizes.bytes_per_state else 0)
    _check_steps(worker, sizes)
    told = (
        worker.max_context(),
        worker.trained_context(),
        worker.context_fits(),
        worker.why_uncached(),
        sizes,
    )
    _expect(
        pickle.loads(pickle.dumps(told)) == told,  # noqa: S301
        "what the worker tells is another thing once it was sent",
    )


def _check_steps(worker: Worker, sizes: CacheSizes) -> None:
    """Check that a worker computes an answer of the right length to each prompt."""
    hand = _Hand(worker.execute, len(sizes.windows), sizes.block_size)
    tokens = hand.answer(PROMPTS)
    # A step may return before the device is done.
    worker.synchronize()
    _expect(
        all(len(each) == NEW for each in tokens.values()),
        f"answers have the tokens {tokens}, expected {NEW} each",
    )


def check_executor(given: OpgraftConfig) -> None:
    """Check that the executor of the settings starts, asks and ends all workers.

    Args:
        given: names a model, which is not loaded.
    """
    config = given.resolved()
    executor = executor_of(config)
    workers = config.parallel.tensor * config.parallel.pipeline
    try:
        executor.start()
        found = executor.call_all("synchronize")
        _expect(len(found) == workers, f"{len(found)} workers have answered")
        _expect(executor.call("synchronize") is None, "call returned what no worker did")
        _expect(
            (executor.loss, executor.is_lost) == ("", False),
            f"workers that run are lost: {executor.loss}",
        )
        executor.check_health()
        # No step is pending, and the call must return all the same.
        executor.drop()
    finally:
        # A second shutdown must do nothing.
        executor.shutdown()
        executor.shutdown()
    try:
        executor.call("synchronize")
    except EngineError:
        return
    raise AssertionError("a call after the shutdown was made: that is an EngineError")


def check_proposer(given: OpgraftConfig) -> None:
    """Check that the proposer of the settings guesses tokens, and leaves requests as they are.

    Args:
        given: names a ``speculation.method``.
    """
    proposer = proposer_of(given.resolved())
    requests = [Request(name, prompt * 3, GREEDY) for name, prompt in PROMPTS.items()]
    for most in (1, 3, 8):
        for request in requests:
            before = request.tokens()
            guess = proposer.propose(request, most)
            _expect(len(guess) <= most, f"{len(guess)} tokens were proposed, {most} asked for")
            are_tokens = all(type(token) is int and token >= 0 for token in guess)
            _expect(are_tokens, f"{guess} was proposed: tokens are integers of at least 0")
            _expect(request.tokens() == before, "the proposer changed the tokens of a request")
            request.append(before[0], 1 << 20)
    # Tokens of a step that was interrupted are dropped.
    proposer.forget_all()
    for request in requests:
        request.drop_output(len(request.prompt))
        request.start_anew()
        proposer.propose(request, 2)
        # A request may end before anything is proposed, and its id may come again.
        proposer.forget(request)
        proposer.forget(request)
        proposer.propose(request, 2)


def check_memory_query(query: MemoryQuery, most: int = 1 << 28) -> None:
    """Check that free memory is told in bytes, and shrinks with each allocation.

    Args:
        query: of a device with memory.
        most: bytes to take, up to five times.
    """
    free = query.free()
    _expect(
        type(free) is int and free > 0,
        f"free returned {free!r}: it is to return bytes, as an integer",
    )
    size = min(most, int(free or 0) // 8)
    # Held to the end: an allocator may keep memory that is given back, and give that again.
    held = []
    # Other processes take and give back memory, too: one of several attempts must succeed.
    for _ in range(5):
        before = query.free() or 0
        held.append(torch.ones(size, dtype=torch.int8, device=query.device))
        after = query.free() or 0
        if size // 2 <= before - after <= 2 * size:
            return
    raise AssertionError(f"{size} bytes were taken, and what is free went from {before} to {after}")


def check_step_graph(
    make: Callable[[Callable[..., Any]], StepGraph] = StepGraph, device: torch.device | str = "cpu"
) -> None:
    """Check that each call of a graph equals the program, and leaves earlier results alone.

    Args:
        make: constructs the graph of a program.
        device: of inputs and caches.
    """

    def program(inputs: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache[:4] += inputs
        return inputs * 2, cache.sum(-1)

    cache = torch.zeros(6, 3, device=device)
    own = torch.zeros(6, 3)
    graph = make(program)
    calls = []
    for number in range(4):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        found = graph(inputs.to(device), cache)
        calls.append((found, program(inputs, own)))
    # After all calls, as a later one may change the results of an earlier one.
    for number, (found, expected) in enumerate(calls):
        for ours, right in zip(found, expected, strict=True):
            close = torch.allclose(ours.cpu(), right, atol=1e-5)
            _expect(close, f"call {number} returned other numbers, or a later one has changed them")
    _expect(
        torch.allclose(cache.cpu(), own, atol=1e-5),
        "the cache does not have what the program writes",
    )
