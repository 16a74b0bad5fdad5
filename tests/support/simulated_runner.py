"""A runner without a model, which finds every fault of a schedule that a model would answer with wrong tokens.

In the place of keys and values it keeps, in every cell of the cache, a digest of the sequence up to that token. To
"attend" is to see that each cell in the window has the digest that it must have.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opgraft import SamplingParams
from opgraft.config import OpgraftConfig, SchedulerConfig, SpeculationConfig
from opgraft.config.sections import LoRAConfig
from opgraft.engine.drafting.proposer import Proposer
from opgraft.engine.request import Request
from opgraft.engine.schedule.kv_cache import KVCacheManager, LayerKind
from opgraft.engine.schedule.scheduler import Scheduler
from opgraft.engine.step import NewSequence, ScheduledPart, Step

VOCABULARY = 3
EOS = 0
NAMES = [f"{name}{sibling}" for name in range(50) for sibling in ("", "/0", "/1")]
"""Ids of requests, which are given anew as soon as they are free, those of siblings too."""


def digest(before: int, token: int) -> int:
    return hash((before, token))


def first_state(salt: str | None) -> int:
    """The digest of no tokens; hash() of a string or None differs from process to process."""
    return sum((salt or "").encode()) + (salt is None)


def next_token(state: int) -> int:
    """The token that the "model" gives after a sequence of this digest: mostly 1 and 2, the end now and then."""
    return EOS if state % 17 == 0 else 1 + state // 17 % (VOCABULARY - 1)


@dataclass
class Known:
    """What the runner knows of a sequence: made of what steps say, and of nothing else."""

    new: NewSequence
    tokens: list[int]
    tables: list[list[int]]
    states: list[int]
    computed: int

    def append(self, token: int) -> bool:
        """Add a sampled token, and tell whether it ends the sequence."""
        self.tokens.append(token)
        self.states.append(digest(self.states[-1], token))
        params = self.new.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.new.eos)}
        return token in ends and len(self.tokens) > self.new.prompt_length + params.min_tokens


@dataclass
class Runner:
    """Executes steps and checks what they read."""

    kinds: Sequence[LayerKind]
    block_size: int
    salts: Mapping[int, str | None]
    cells: dict[tuple[int, int, int], int] = field(default_factory=dict)
    sequences: dict[str, Known] = field(default_factory=dict)
    further: dict[str, list[tuple[int, None]]] = field(default_factory=dict)

    def execute(self, step: Step) -> dict[str, int]:
        for request_id in step.removed:
            self.sequences.pop(request_id, None)  # which a step that failed may not have added
        for new in step.added:
            self._add(new)
        copied = [
            (kind, target, offset, self.cells.get((kind, source, offset)))
            for source, target in step.copies
            for kind in range(len(self.kinds))
            for offset in range(self.block_size)
        ]
        for kind, target, offset, value in copied:
            if value is not None:
                self.cells[kind, target, offset] = value
        for scheduled in step.sequences:
            self._write(scheduled)
        self.further = {}
        return {
            s.request_id: token for s in step.sequences if (token := self._attend(s)) is not None
        }

    def _add(self, new: NewSequence) -> None:
        assert new.request_id not in self.sequences, "added twice"
        states = [first_state(self.salts.get(new.arrival))]
        for token in new.tokens:
            states.append(digest(states[-1], token))
        tables = [list(blocks) for blocks in new.blocks]
        self.sequences[new.request_id] = Known(new, list(new.tokens), tables, states[1:], -1)

    def _write(self, scheduled: ScheduledPart) -> None:
        sequence = self.sequences[scheduled.request_id]
        assert sequence.computed in (-1, scheduled.start)
        end = scheduled.start + scheduled.count
        sequence.computed = end - len(scheduled.draft)
        assert scheduled.samples == (sequence.computed == len(sequence.tokens))
        assert scheduled.token in (None, *sequence.tokens[scheduled.start : sequence.computed])
        states = list(sequence.states)
        for token in scheduled.draft:
            states.append(digest(states[-1], token))
        for kind, (table, new) in enumerate(
            zip(sequence.tables, scheduled.new_blocks, strict=True)
        ):
            table += new
            assert len(table) >= -(-end // self.block_size)
            for position in range(scheduled.start, end):
                cell = kind, table[position // self.block_size], position % self.block_size
                self.cells[cell] = states[position]

    def _attend(self, scheduled: ScheduledPart) -> int | None:
        sequence = self.sequences[scheduled.request_id]
        for kind, table in enumerate(sequence.tables):
            window = self.kinds[kind].sliding_window
            first = 0 if window is None else max(scheduled.start + 1 - window, 0)
            for position in range(first, sequence.computed):
                cell = kind, table[position // self.block_size], position % self.block_size
                assert self.cells[cell] == sequence.states[position], "another's keys and values"
        if not scheduled.samples:
            return None
        sampled = next_token(sequence.states[-1])
        ended = sequence.append(sampled)
        for guess in scheduled.draft:
            if ended or guess != sequence.tokens[-1]:
                break
            sequence.computed += 1
            token = next_token(sequence.states[-1])
            ended = sequence.append(token)
            self.further.setdefault(scheduled.request_id, []).append((token, None))
        return sampled


def expected_output(request: Request, max_model_len: int) -> list[int]:
    """The output that a request has when nothing else runs."""
    state, output, params = first_state(request.cache_salt), [], request.params
    for token in request.prompt:
        state = digest(state, token)
    while len(output) < params.max_tokens and len(request.prompt) + len(output) < max_model_len:
        output.append(next_token(state))
        state = digest(state, output[-1])
        ends = (
            {EOS, *params.stop_token_ids} if not params.ignore_eos else set(params.stop_token_ids)
        )
        if output[-1] in ends and len(output) > params.min_tokens:
            break
    return output


def _sequences(request: Request) -> Sequence[ScheduledPart]:
    return request.computing.sequences if request.computing else ()


def check_invariants(scheduler: Scheduler, step: Step, faults: bool = False) -> None:
    """Check a schedule just made against its limits, and every block against the tables that it stands in."""
    config, cache = scheduler.config, scheduler.cache
    assert sum(s.count for s in step.sequences) <= config.max_num_batched_tokens
    assert len(scheduler.running) <= config.max_num_seqs
    assert len(scheduler.under_way) > 1 or bool(step.sequences) == scheduler.has_work, (
        "a step without progress"
    )
    computed = [request for pending in scheduler.under_way._steps for request in pending.requests()]
    assert len(set(computed)) == len(computed), "computed by two steps"
    assert all(request.computing in scheduler.under_way._steps for request in computed)
    assert all(s.count > 0 for s in step.sequences)
    for queue in (scheduler.running, scheduler.waiting):
        assert queue == sorted(queue, key=lambda r: r.rank)
    tables = cache._tables
    assert set(tables) == {r.request_id for r in scheduler.running}
    used = Counter(block for rows in tables.values() for table in rows for block in table.held())
    assert all(
        cache.pool.references(block) == used[block] for block in range(cache.pool.num_blocks)
    )
    assert cache.pool.num_free + len(used) == cache.pool.num_blocks
    for request in scheduler.running:
        counted = [s.count for s in _sequences(request) if s.request_id == request.request_id]
        covered = -(-(request.num_computed + sum(counted)) // cache.block_size)
        # A draft that was not accepted leaves blocks for the next tokens.
        most = covered if scheduler.drafting is None else len(tables[request.request_id][0].blocks)
        assert most >= covered
        assert all(len(table.blocks) == most for table in tables[request.request_id])
    names = {new.request_id for new in step.added}
    added = [r for r in scheduler.running if r.request_id in names]
    waiting = [r for r in scheduler.waiting if not scheduler._awaits_parent(r)]
    short = scheduler._longest_short
    # A short request may overtake a long prompt of its priority.
    assert all(
        earlier.rank > later.rank
        or (earlier.num_tokens > short >= later.num_tokens and earlier.rank[0] == later.rank[0])
        for earlier in waiting
        for later in added
    ), "somebody was overtaken"
    preempted_now = [
        r for r in scheduler.waiting if r.num_preemptions and r.request_id in step.removed
    ]
    if preempted_now and step.added and not faults:  # by which others are removed, too
        (new,) = step.added  # for whom way was made
        better = scheduler._requests[new.request_id].rank[0]
        assert all(better < r.rank[0] for r in preempted_now), "admitted in a step that preempted"


class Seer(Proposer):
    """Proposes what the "model" gives, and now and then something else."""

    def propose(self, request: Request, most: int) -> list[int]:
        state = first_state(request.cache_salt)
        for token in request.tokens():
            state = digest(state, token)
        guess = []
        for place in range(most - state % 2):
            wrong = (state >> 3) % 5 == place
            guess.append((next_token(state) + wrong) % VOCABULARY)
            state = digest(state, guess[-1])
        return guess

    def forget(self, request: Request) -> None:
        pass

    def forget_all(self) -> None:
        pass


@dataclass
class Traffic:
    """Random requests with aborts, driven to their end; every answer is checked."""

    scheduler: Scheduler
    random: random.Random
    checked: bool = True
    faults: float = 0.0
    steps: list[Step] = field(default_factory=list)
    answers: list[Request] = field(default_factory=list)
    salts: dict[int, str | None] = field(default_factory=dict)
    answered: deque[int] = field(default_factory=deque)
    live: dict[str, Request] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        cache = self.scheduler.cache
        self.runner = Runner(cache.kinds, cache.block_size, self.salts)

    def run(self, num_requests: int, rate: float = 0.5, aborts: float = 0.02) -> None:
        while self.number < num_requests or self.scheduler.has_work or self.steps:
            while (
                self.number < num_requests and len(self.live) < 40 and self.random.random() < rate
            ):
                self._add()
            self._abort(aborts)
            self._schedule()
            self._abort(aborts)
            if self.random.random() < self.faults:
                self._fail()
            elif self.steps:
                self._update()
        self._schedule()
        self._update()
        self.check_end()

    def _schedule(self) -> None:
        """Have as many steps computed as the scheduler has at once."""
        while len(self.steps) < self.scheduler.depth:
            step = self.scheduler.schedule()
            if step is None:
                return
            if self.checked:
                check_invariants(self.scheduler, step, self.faults > 0)
            self.steps.append(step)

    def _update(self) -> None:
        """Execute the first step, and have its tokens taken in."""
        step = self.steps.pop(0)
        tokens = self.runner.execute(step)
        for request in self.scheduler.update(step, tokens, further=self.runner.further):
            self._answer(request)

    def _fail(self) -> None:
        """Have one of the steps fail, behind others that are executed in vain; its requests end by that."""
        failing = self.random.choice(self.steps)
        for step in self.steps[: self.random.randrange(len(self.steps) + 1)]:
            self.runner.execute(step)
        self.steps.clear()
        for request in self.scheduler.undo(failing):
            self.scheduler.abort(request.request_id, "error")
            self._answer(request)

    def check_end(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.cache.pool
        queues = (scheduler.running, scheduler.waiting, scheduler._parked)
        left = (self.live, self.runner.sequences, *queues, scheduler.cache._tables)
        assert not any(
            (*left, scheduler._requests, scheduler.under_way.removed, scheduler.under_way)
        )
        assert pool.num_free == pool.num_blocks
        assert not any(pool.references(block) for block in range(pool.num_blocks))

    def _add(self) -> None:
        draw, longest = self.random, self.scheduler.max_model_len
        length = draw.randint(1, draw.choice((max(longest // 4, 1), longest - 1)))
        prompt = [draw.choice((1, 1, 1, 2)) for _ in range(length)]
        n = draw.choice((1, 1, 1, 3))
        max_tokens = draw.randint(1, longest)
        params = SamplingParams(
            n=n, max_tokens=max_tokens, min_tokens=draw.randint(0, max_tokens), ignore_eos=draw.random() < 0.3,
            stop_token_ids=draw.choice(((), (2,))), prompt_logprobs=draw.choice((None, None, None, 0)),
        )  # fmt: skip
        name = draw.choice(NAMES)
        while name in self.live or any(f"{name}/{index}" in self.live for index in range(n)):
            name = draw.choice(NAMES)
        salt = draw.choice((None, None, "a", "b"))
        request = Request(
            name, prompt, params, eos={EOS}, priority=draw.randint(0, 2), cache_salt=salt
        )
        for sample in request.split():
            self.scheduler.add(sample)
            self.live[sample.request_id] = sample
            self.salts[sample.arrival] = salt
            self.number += 1

    def _abort(self, share: float) -> None:
        if self.live and self.random.random() < share:
            name = self.random.choice(list(self.live))
            self.scheduler.abort(name)
            self._answer(self.live[name])

    def _answer(self, request: Request) -> None:
        assert self.live.pop(request.request_id, None) is request, "answered twice"
        expected = expected_output(request, self.scheduler.max_model_len)
        if request.finish_reason in ("abort", "error"):
            assert request.output == expected[: len(request.output)]
        else:
            assert request.output == expected
        if self.checked:
            self.answers.append(request)
        self.answered.append(request.arrival)
        if len(self.answered) > 100:  # by then no step computes it
            del self.salts[self.answered.popleft()]


def make_scheduler(
    kinds: Sequence[LayerKind] = (LayerKind(),),
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    prefix_reuse: bool = True,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    budget: int = 32,
    chunked: bool = True,
    policy: str = "fcfs",
    depth: int = 1,
    drafts: int = 0,
    max_loras: int = 8,
    long_prefill_token_threshold: int | None = None,
) -> Scheduler:
    """A scheduler with tables of blocks, and drafts of so many tokens at most, some of them right."""
    config = SchedulerConfig(
        max_num_seqs=min(max_num_seqs, budget),
        max_num_batched_tokens=budget,
        chunked_prefill=chunked,
        policy=policy,
        long_prefill_token_threshold=long_prefill_token_threshold,
    )
    speculation = SpeculationConfig(
        method="ngram" if drafts else None, max_tokens=drafts or 1, adaptive=False, exact=False
    )
    lora = LoRAConfig(max_loras=max_loras)
    given = OpgraftConfig(scheduler=config, speculation=speculation, lora=lora).resolved()
    scheduler = Scheduler(
        given,
        KVCacheManager(kinds, num_blocks, block_size, prefix_reuse),
        max_model_len,
        depth=depth,
    )
    if scheduler.drafting is not None:
        scheduler.drafting.proposer = Seer(given)
    return scheduler
