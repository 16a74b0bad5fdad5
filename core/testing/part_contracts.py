"""Contracts of executor, worker, model runner, sampler, memory query and step graph, each by itself.

As those of ``contracts``: a plugin's own tests call them, with the plugin active, and ``AssertionError`` says what is
broken.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opgraft.config import OpgraftConfig
from opgraft.engine.cache_layout import CacheSizes
from opgraft.engine.executors import executor_of
from opgraft.engine.memory_query import MemoryQuery
from opgraft.engine.model_runner import ModelRunner
from opgraft.engine.sampling import Sampled, Sampler, SamplingBatch
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.step import NewSequence, Scheduled, Step, StepResult
from opgraft.engine.step_program import StepGraph
from opgraft.engine.worker import Worker
from opgraft.errors import ConfigError, EngineError, RequestError
from opgraft.plugins.selection import current_platform
from torch import Tensor

VOCABULARY = 8
"""Tokens that samplers choose from."""

DRAWS, MOST_DEVIATION = 4000, 40.0
"""Tokens drawn of one distribution, and the most that chi-square may be: by chance it is, once in a million times."""

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
    """See that a sampler chooses as requests ask: likeliest tokens, drawn ones, banned ones, and rows that fail alone.

    Args:
        make: constructs it.
        device: where logits are.
    """
    sampler = make()
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(device)
    before = logits.clone()
    greedy = _sampled(sampler, logits, [GREEDY] * 3)
    _expect(torch.equal(logits, before), "the sampler wrote to the logits that it was given")
    _expect(greedy.tokens.dtype == torch.int64, f"tokens are {greedy.tokens.dtype}, expected int64")
    _expect(
        greedy.tokens.tolist() == logits.argmax(-1).tolist(),
        "temperature 0 did not take the likeliest tokens",
    )
    biased = _sampled(
        sampler, logits, [SamplingParams(temperature=0, logit_bias={2: 100.0}, logprobs=1)] * 3
    )
    _expect(biased.tokens.tolist() == [2] * 3, "logit_bias did not change what is chosen")
    _check_logprobs(biased, logits)
    _check_draws(sampler, logits[:1])
    _check_failures(sampler, logits, greedy.tokens.tolist())


def _sampled(sampler: Sampler, logits: Tensor, params: Sequence[SamplingParams]) -> Sampled:
    batch = SamplingBatch()
    for key, each in enumerate(params):
        batch.add(key, each, (1, 2), arrival=key)
    found: Sampled = sampler(logits, batch)
    return found


def _check_logprobs(found: Sampled, logits: Tensor) -> None:
    expected = logits.float().log_softmax(-1)
    for row, token in enumerate(found.tokens.tolist()):
        told = found.logprobs[row]
        _expect(
            told.token == token,
            f"log-probabilities of row {row} are of token {told.token}, not of {token}",
        )
        right = abs(told.logprob - float(expected[row, token])) < 1e-4
        _expect(
            right,
            f"the log-probability of row {row} is {told.logprob}, not that of the logits as they were given",
        )


def _check_draws(sampler: Sampler, logits: Tensor) -> None:
    """See that draws have the distribution of the logits, keep to filters, and depend on nothing but their request."""
    params = [SamplingParams(temperature=0.7, seed=seed) for seed in range(DRAWS)]
    tokens = _sampled(sampler, logits.expand(DRAWS, -1), params).tokens
    expected = DRAWS * (logits[0].double() / 0.7).softmax(-1).cpu()
    found = torch.bincount(tokens.cpu(), minlength=VOCABULARY)
    deviation = float(((found - expected) ** 2 / expected).sum())
    _expect(
        deviation < MOST_DEVIATION,
        f"tokens drawn are {found.tolist()}, expected about {expected.round().tolist()}",
    )
    alone = [int(_sampled(sampler, logits, [each]).tokens) for each in params[:20]]
    _expect(
        tokens[:20].tolist() == alone, "a seeded request has other tokens beside others than alone"
    )
    few = [SamplingParams(temperature=2.0, top_k=2, seed=seed) for seed in range(50)]
    kept = set(_sampled(sampler, logits.expand(50, -1), few).tokens.tolist())
    _expect(
        kept <= set(logits[0].topk(2).indices.tolist()),
        f"top_k=2 let the tokens {sorted(kept)} through",
    )


def _check_failures(sampler: Sampler, logits: Tensor, right: list[int]) -> None:
    spoilt = logits.index_fill(0, torch.tensor([1], device=logits.device), torch.nan)
    found = _sampled(sampler, spoilt, [GREEDY] * 3)
    _expect(
        set(found.errors) == {1},
        f"logits of row 1 are NaN, and the rows {sorted(map(str, found.errors))} failed",
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


def check_model_runner(
    given: OpgraftConfig, expected: Mapping[str, Sequence[int]] | None = None
) -> dict[str, list[int]]:
    """See that a model runner follows ``Step``, which is made by hand here: no scheduler is part of it.

    A prompt is computed whole, in chunks beside another one, and behind a prefix that was copied: its tokens are the
    same. What is removed is forgotten, so that its name and its blocks are another's.

    Args:
        given: names a decoder.
        expected: tokens of the prompts, such as a runner without the plugin returned; not compared if not given.

    Returns:
        The tokens of each prompt.
    """
    config = given.resolved()
    runner = ModelRunner(config, torch.device(config.load.device or current_platform().device_type))
    runner.load_model()
    runner.allocate_cache(BLOCKS, STATES if runner.layout.states else 0)
    runner.compile_model()
    hand = _Hand(runner.execute, len(runner.layout.groups), runner.layout.block_size)
    whole = {name: hand.answer({name: prompt})[name] for name, prompt in PROMPTS.items()}
    together = hand.answer(PROMPTS, chunk=4)
    _expect(
        together == whole,
        f"prompts in chunks beside each other have the tokens {together}, alone {whole}",
    )
    if not runner.layout.states:  # which no copy of blocks has
        copied = hand.answer_behind_copy(PROMPTS["long"])
        _expect(
            copied == whole["long"],
            f"behind a prefix that was copied the tokens are {copied}, not {whole['long']}",
        )
    if expected is not None:
        _expect(
            whole == {name: [*tokens] for name, tokens in expected.items()},
            f"tokens are {whole}, not {expected}",
        )
    return whole


class _Hand:
    """Makes steps by hand.

    Args:
        execute: computes one.
        kinds: tables of a sequence.
        block_size: tokens in a block.
    """

    def __init__(self, execute: Callable[[Step], StepResult], kinds: int, block_size: int) -> None:
        self._execute, self._kinds, self._size = execute, kinds, block_size

    def _blocks(self, place: int, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Return the tables of a sequence: each has blocks of its own, which lie scattered."""
        count, most = (
            -(-length // self._size) for length in (tokens, max(map(len, PROMPTS.values())) + NEW)
        )
        firsts = [(place * self._kinds + kind) * most for kind in range(self._kinds)]
        return tuple(
            tuple(5 * (first + number) % BLOCKS for number in range(count)) for first in firsts
        )

    def _new(self, name: str, prompt: Sequence[int], place: int) -> NewSequence:
        longest = len(prompt) + NEW
        return NewSequence(
            name,
            tuple(prompt),
            len(prompt),
            longest,
            GREEDY,
            self._blocks(place, longest),
            place,
            state=place,
        )

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

    def answer(
        self, prompts: Mapping[str, Sequence[int]], chunk: int = 1 << 30
    ) -> dict[str, list[int]]:
        """Compute prompts beside each other, in chunks of some tokens, and the tokens that follow."""
        added = tuple(
            self._new(name, prompt, place) for place, (name, prompt) in enumerate(prompts.items())
        )
        states = tuple((None, each.state) for each in added)
        done, outputs = dict.fromkeys(prompts, 0), {name: list[int]() for name in prompts}
        while any(len(tokens) < NEW for tokens in outputs.values()):
            batch = []
            for name, prompt in prompts.items():
                count = min(chunk, len(prompt) - done[name]) if done[name] < len(prompt) else 1
                if len(outputs[name]) < NEW:
                    token = outputs[name][-1] if outputs[name] else None
                    samples = done[name] + count >= len(prompt)
                    batch.append(
                        Scheduled(name, done[name], count, ((),) * self._kinds, samples, token)
                    )
                    done[name] += count
            for name, token in self._computed(Step((), added, (), tuple(batch), states)).items():
                outputs[name].append(token)
            added, states = (), ()
        self._execute(Step(tuple(prompts), (), (), ()))
        return outputs

    def answer_behind_copy(self, prompt: Sequence[int]) -> list[int]:
        """Compute a prompt, copy its first blocks to others, and answer it from there."""
        first, second = self._new("first", prompt, 0), self._new("second", prompt, 1)
        rest = ((),) * self._kinds
        self._computed(Step((), (first,), (), (Scheduled("first", 0, len(prompt), rest, True),)))
        shared = (len(prompt) - 1) // self._size
        pairs = zip(first.blocks, second.blocks, strict=True)
        copies = tuple(
            pair
            for ours, theirs in pairs
            for pair in zip(ours[:shared], theirs[:shared], strict=True)
        )
        start = shared * self._size
        batch = (Scheduled("second", start, len(prompt) - start, rest, True),)
        found = [self._computed(Step(("first",), (second,), copies, batch))["second"]]
        for number in range(NEW - 1):
            batch = (Scheduled("second", len(prompt) + number, 1, rest, True, found[-1]),)
            found.append(self._computed(Step((), (), (), batch))["second"])
        self._execute(Step(("second",), (), (), ()))
        return found


def check_worker(given: OpgraftConfig) -> None:
    """See that a worker prepares its device, tells its memory, and computes a step; what it returns can be sent.

    Args:
        given: names a decoder, and leaves the size of the cache open.
    """
    config = given.resolved()
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
        raise AssertionError(
            f"expect_memory took a cache of {1 << 50} blocks: that is a ConfigError"
        )
    worker.allocate_cache(BLOCKS, STATES if sizes.bytes_per_state else 0)
    hand = _Hand(worker.execute, len(sizes.windows), sizes.block_size)
    tokens = hand.answer(PROMPTS)
    worker.synchronize()
    _expect(
        all(len(each) == NEW for each in tokens.values()),
        f"answers have the tokens {tokens}, expected {NEW} each",
    )
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


def check_executor(given: OpgraftConfig) -> None:
    """See that the executor which settings ask for starts its workers, asks all of them, and lets go of them once.

    Args:
        given: names a model, which is not loaded.
    """
    config = given.resolved()
    executor, sizes = executor_of(config), config.parallel
    try:
        executor.start()
        found = executor.call_all("synchronize")
        _expect(len(found) == sizes.tensor * sizes.pipeline, f"{len(found)} workers have answered")
        _expect(executor.call("synchronize") is None, "call returned what no worker did")
        _expect(
            (executor.loss, executor.is_lost) == ("", False),
            f"workers that run are lost: {executor.loss}",
        )
        executor.check_health()
        executor.drop()
    finally:
        executor.shutdown()
        executor.shutdown()
    try:
        executor.call("synchronize")
    except EngineError:
        return
    raise AssertionError("a call after the shutdown was made: that is an EngineError")


def check_memory_query(query: MemoryQuery, most: int = 1 << 28) -> None:
    """See that free memory is told in bytes, and shrinks by what is taken.

    Args:
        query: of a device that has memory.
        most: bytes to take, up to five times.
    """
    free = query.free()
    _expect(
        type(free) is int and free > 0,
        f"free returned {free!r}: it is to return bytes, as an integer",
    )
    size = min(most, int(free or 0) // 8)
    held = []  # to the end: what is given back an allocator may keep, and give again
    for _ in range(5):  # as others take and give back, too
        before = query.free() or 0
        held.append(torch.ones(size, dtype=torch.int8, device=query.device))
        after = query.free() or 0
        if size // 2 <= before - after <= 2 * size:
            return
    raise AssertionError(f"{size} bytes were taken, and what is free went from {before} to {after}")


def check_step_graph(
    make: Callable[[Callable[..., Any]], StepGraph] = StepGraph, device: torch.device | str = "cpu"
) -> None:
    """See that each call of a graph does what its program does with these inputs, and leaves what it returned before.

    Args:
        make: constructs it of a program.
        device: where inputs and caches are.
    """

    def program(inputs: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache[:4] += inputs
        return inputs * 2, cache.sum(-1)

    cache, own = torch.zeros(6, 3, device=device), torch.zeros(6, 3)
    graph, seen = make(program), []
    for number in range(4):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        seen.append((graph(inputs.to(device), cache), program(inputs, own)))
    for number, (found, expected) in enumerate(seen):
        for ours, right in zip(found, expected, strict=True):
            close = torch.allclose(ours.cpu(), right, atol=1e-5)
            _expect(close, f"call {number} returned other numbers, or a later one has changed them")
    _expect(
        torch.allclose(cache.cpu(), own, atol=1e-5),
        "the cache does not have what the program writes",
    )
