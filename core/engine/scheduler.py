"""The choice of what the next step computes: continuous batching without phases.

A request's computed tokens catch up with its tokens. A prompt, a chunk of it, a decode and a sequence that starts anew
after it gave its blocks away differ in nothing but the number of tokens that are missing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import count
from operator import attrgetter
from time import monotonic

from opgraft.config import SchedulerConfig
from opgraft.engine.context_fit import ContextFit
from opgraft.engine.kv_cache import KVCacheManager, Prefix
from opgraft.engine.request import FinishReason, Request
from opgraft.engine.stats import Counters
from opgraft.engine.step import Blocks, NewSequence, Scheduled, Step
from opgraft.errors import RequestError

_rank = attrgetter("rank")


class _Draft:
    """A step in the making: the tokens that are left for it, and what it holds so far."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prompt_tokens = 0
        self.batch: list[Request] = []
        self.sequences: list[Scheduled] = []
        self.added: list[NewSequence] = []
        self.copies: list[tuple[int, int]] = []

    def take(self, request: Request, count: int, new_blocks: Blocks) -> None:
        start = request.num_computed
        samples = start + count == request.num_tokens
        self.batch.append(request)
        self.sequences.append(Scheduled(request.request_id, start, count, new_blocks, samples))
        self.budget -= count
        if count > 1 or not request.output:
            self.prompt_tokens += count


class Scheduler:
    """Requests that run and requests that wait, each in order, and the step that comes next.

    The order is that of arrival; under the policy "priority" that of priorities, and of arrival among equals. It holds
    for who is scheduled first, who is admitted next and, from its end, who gives its blocks to others. So whoever is
    first gets on, and among equals nobody starves.

    Args:
        config: the limits of a step, and the policy; every field is set.
        cache: the tables of blocks, which nobody else changes.
        max_model_len: tokens of prompt and output together, at most.
        fits: the model's ropes that depend on the length of the context. They rotate tokens for the length of their own
            sequence: those of a prompt for that of the prompt, later ones for the length that the sequence has with
            them. A sequence that comes to where all its keys should have been rotated in another way is computed anew.
    """

    def __init__(
        self, config: SchedulerConfig, cache: KVCacheManager, max_model_len: int, fits: Sequence[ContextFit] = ()
    ) -> None:
        self.config = config
        self.cache = cache
        self.max_model_len = max_model_len
        self.fits = fits
        self.counters = Counters()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._batch: list[Request] = []
        self._removed: list[str] = []
        self._arrivals = count()

    @property
    def has_work(self) -> bool:
        """Tell whether a request runs or waits."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Have a request wait for its turn.

        Raises:
            RequestError: its id is in use, or it could never be served: prompt, cache and limits do not fit.
        """
        self._check(request)
        request.arrival = next(self._arrivals)
        request.rank = (request.priority if self.config.policy == "priority" else 0, request.arrival)
        request.rotation = self._rotation(request)
        self._requests[request.request_id] = request
        insort(self.waiting, request, key=_rank)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Request:
        """End a request at any time, between ``schedule`` and ``update`` too, and return it.

        Raises:
            RequestError: no request of that id runs or waits.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(
                f"request {request_id!r} cannot be aborted, as none of that id runs or waits: it has finished, or was "
                "never added; see that the id is the one that it was added by"
            )
        request.finish_reason = reason
        self._finish(request)
        return request

    def schedule(self) -> Step:
        """Choose the tokens of the next step: of those that run, then of those that wait."""
        draft = _Draft(self.config.max_num_batched_tokens)
        if self._schedule_running(draft):
            self._admit(draft)
        removed, self._removed = self._removed, []
        self._batch = draft.batch
        self.counters.prompt_tokens += draft.prompt_tokens
        self.counters.decode_tokens += self.config.max_num_batched_tokens - draft.budget - draft.prompt_tokens
        return Step(tuple(removed), tuple(draft.added), tuple(draft.copies), tuple(draft.sequences))

    def update(self, step: Step, tokens: Mapping[str, int]) -> list[Request]:
        """Take the tokens that the last step sampled, and return the requests that they finish.

        Raises:
            RequestError: a sequence that samples, and was not aborted since, has no token.
        """
        finished = []
        for request, scheduled in zip(self._batch, step.sequences, strict=True):
            if request.status != "running":
                continue
            request.num_computed += scheduled.count
            self.cache.computed(request, scheduled.start)
            if scheduled.samples and request.append(_token_of(request, tokens), self.max_model_len):
                self._finish(request)
                finished.append(request)
            elif any(fit.outgrown(request.context, request.num_tokens) for fit in self.fits):
                self._rotate_anew(request)
        self._batch = []
        return finished

    def undo(self, step: Step) -> list[Request]:
        """Have the last step, which was not computed to its end, forgotten; return the requests that it was for.

        They wait and are computed anew, unless they are aborted now. What the step was to remove is removed by the
        next one, together with what it was to compute.
        """
        batch = [request for request in self._batch if request.status == "running"]
        for request in batch:
            self._requeue(request)
        self._removed[:0] = step.removed
        self._batch = []
        return batch

    def _schedule_running(self, draft: _Draft) -> bool:
        """Schedule those that run, and tell whether there were blocks for all of them.

        Where there are none, the last one gives its own up. If it is the last itself, it keeps them and waits.
        """
        had_blocks = True
        for request in self.running:  # which gets shorter at its end only
            count = self._count(request.num_tokens - request.num_computed, draft.budget)
            if not count:
                continue
            while (new_blocks := self.cache.extend(request, count)) is None:
                had_blocks = False
                if request is self.running[-1]:
                    return False
                self._preempt(self.running[-1])
            draft.take(request, count, new_blocks)
        return had_blocks

    def _admit(self, draft: _Draft) -> None:
        """Admit those that wait in order, until one does not fit: then those behind it wait too."""
        while draft.budget and len(self.running) < self.config.max_num_seqs:
            request = next((r for r in self.waiting if not self._awaits_parent(r)), None)
            if request is None:
                return
            prefix = self._prefix(request)
            count = self._count(request.num_tokens - prefix.num_tokens, draft.budget)
            if not count or not self.cache.fits(request, prefix, self.config.max_num_batched_tokens, self._reserve()):
                return
            self._start(request, prefix, count, draft)

    def _start(self, request: Request, prefix: Prefix, count: int, draft: _Draft) -> None:
        _take_out(self.waiting, request)
        insort(self.running, request, key=_rank)
        request.status = "running"
        request.num_computed = request.num_cached = prefix.num_tokens
        request.admitted = request.admitted or monotonic()
        self.counters.prefix_queries += request.num_tokens
        self.counters.prefix_hits += prefix.num_tokens
        draft.copies += self.cache.open(request, prefix)
        self.cache.extend(request, count)
        draft.take(request, count, self.cache.no_blocks)
        draft.added.append(
            NewSequence(
                request.request_id,
                tokens=tuple(request.tokens()),
                prompt_length=len(request.prompt),
                context=request.context,
                params=request.params,
                blocks=self.cache.blocks(request),
                arrival=request.arrival,
                eos=request.eos,
                bad_words=request.bad_words,
                grammar=request.grammar,
            )
        )

    def _count(self, missing: int, budget: int) -> int:
        """Return how many of the missing tokens a step takes that has ``budget`` left.

        Without chunks it takes all or none. A sequence that outgrew a whole step before it was preempted needs several.
        """
        whole = self.config.chunked_prefill or budget == self.config.max_num_batched_tokens
        return min(missing, budget) if whole or missing <= budget else 0

    def _reserve(self) -> int:
        """Return the blocks that stay free when a request is admitted: as many as those that run will ask for next.

        Without them the newcomer would soon give its blocks back, and be computed anew.
        """
        return len(self.running) * len(self.cache.kinds)

    def _awaits_parent(self, request: Request) -> bool:
        parent = self._requests.get(request.parent) if request.parent else None
        return parent is not None and parent.status == "running" and parent.num_computed < len(parent.prompt)

    def _prefix(self, request: Request) -> Prefix:
        """Return what need not be computed of a request: the parent's prompt, or what else the cache has."""
        if request.params.prompt_logprobs is not None:  # the logits of every position are asked for
            return self.cache.no_prefix
        parent = self._requests.get(request.parent) if request.parent else None
        shared = None
        if parent is not None and parent.status == "running" and not request.output:
            # an id may have been given anew, to another prompt
            same = (parent.rotation, parent.cache_salt) == (request.rotation, request.cache_salt)
            same = same and parent.num_computed >= len(parent.prompt) and parent.prompt == request.prompt
            shared = self.cache.common_prefix(request, parent) if same else None
        return shared or self.cache.longest_prefix(request)

    def _rotation(self, request: Request) -> tuple[int, ...]:
        return tuple(fit.way(request.context) for fit in self.fits)

    def _rotate_anew(self, request: Request) -> None:
        """Have all tokens of a sequence computed for the length that it has now."""
        request.context = request.num_tokens
        request.rotation = self._rotation(request)
        request.block_hashes = []
        self._requeue(request)

    def _preempt(self, request: Request) -> None:
        self._requeue(request)
        request.num_preemptions += 1
        self.counters.preemptions += 1

    def _requeue(self, request: Request) -> None:
        self._stop(request)
        request.status = "waiting"
        request.num_computed = 0
        insort(self.waiting, request, key=_rank)

    def _finish(self, request: Request) -> None:
        if request.status == "running":
            self._stop(request)
        else:
            _take_out(self.waiting, request)
        request.status = "finished"
        del self._requests[request.request_id]
        self.counters.finished[str(request.finish_reason)] += 1

    def _stop(self, request: Request) -> None:
        _take_out(self.running, request)
        self.cache.close(request)
        self._removed.append(request.request_id)

    def _check(self, request: Request) -> None:
        """Refuse a request that can never be served; one that passes fits when it runs alone, whatever it samples."""
        name, prompt, limit = f"request {request.request_id!r}", len(request.prompt), self.config.max_num_batched_tokens
        if request.request_id in self._requests:
            raise RequestError(f"{name} is added, and one of that id runs or waits: give each an id of its own")
        if prompt >= self.max_model_len:
            raise RequestError(
                f"{name} has a prompt of {prompt} tokens, and the context holds {self.max_model_len}, prompt and "
                "output together: shorten the prompt, or raise model.max_model_len"
            )
        if prompt > limit and not self.config.chunked_prefill:
            raise RequestError(
                f"{name} has a prompt of {prompt} tokens, and a step takes {limit}, with scheduler.chunked_prefill "
                "off: turn it on, or raise scheduler.max_num_batched_tokens"
            )
        longest = min(prompt + request.params.max_tokens, self.max_model_len)
        needed, there = self.cache.most_blocks(longest - 1, limit), self.cache.pool.num_blocks
        if needed > there:
            raise RequestError(
                f"{name} may grow to {longest} tokens, a prompt of {prompt} and an output of up to {longest - prompt}, "
                f"for which it needs {needed} blocks of {self.cache.block_size} tokens, and the cache has {there}: "
                "lower max_tokens, or raise cache.memory_bytes or cache.memory_share"
            )
        self._check_parent(request)

    def _check_parent(self, request: Request) -> None:
        parent = self._requests.get(request.parent) if request.parent else None
        if parent and (parent.prompt, parent.cache_salt) != (request.prompt, request.cache_salt):
            raise RequestError(
                f"request {request.request_id!r} has {parent.request_id!r} as its parent, which has another prompt or "
                "cache_salt, and would read another's cache: make both with Request.split"
            )


def _take_out(queue: list[Request], request: Request) -> None:
    del queue[bisect_left(queue, request.rank, key=_rank)]


def _token_of(request: Request, tokens: Mapping[str, int]) -> int:
    if request.request_id not in tokens:
        raise RequestError(
            f"the step gave no token for request {request.request_id!r}, which samples: give one for each sequence "
            "that samples, and abort those that failed before"
        )
    return tokens[request.request_id]
