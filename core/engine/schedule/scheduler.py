"""The choice of what the next step computes: continuous batching without phases.

A request's computed tokens catch up with its tokens. A prompt, a chunk of it, a decode and a
sequence that starts anew after it gave its blocks away differ in nothing but the number of tokens
that are missing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from math import inf
from operator import attrgetter
from time import monotonic

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.engine.request import FinishReason, Request
from opgraft.engine.runner.context_fit import ContextFit
from opgraft.engine.schedule.draft import Draft, Drafts, no_token
from opgraft.engine.schedule.kv_cache import KVCacheManager, Prefix
from opgraft.engine.servable import expect_servable
from opgraft.engine.stats import Counters
from opgraft.engine.step import Step
from opgraft.errors import RequestError

_rank = attrgetter("rank")


@PluggableClass.register("scheduler")
class Scheduler(PluggableClass):
    """Requests that run and requests that wait, each in order, and the step that comes next.

    The order is that of arrival; under the policy "priority" that of priorities, and of arrival
    among equals. It holds for who is scheduled first, who is admitted next and, from its end, who
    gives its blocks to others. So whoever is first gets on, and among equals nobody starves. Those
    of a worse priority give place and blocks to a better one that waits, if it can be admitted by
    that.

    Args:
        opgraft_config: all settings. Those of ``scheduler`` are the limits of a step, and the policy.
        cache: the tables of blocks, which nobody else changes.
        max_model_len: tokens of prompt and output together, at most.
        fits: the model's ropes that depend on the length of the context. They rotate tokens for the
            length of their own sequence: those of a prompt for that of the prompt, later ones for
            the length that the sequence has with them. A sequence that comes to where all its keys
            should have been rotated in another way is computed anew.
        depth: steps that are computed at the same time, one behind the other, as by the stages of a
            pipeline. Each has its part of the requests, and no request is in two. A step reads what
            those before it have written, so blocks that are given away while one is computed may be
            in the next.
    """

    def __init__(
        self,
        opgraft_config: OpgraftConfig,
        cache: KVCacheManager,
        max_model_len: int,
        fits: Sequence[ContextFit] = (),
        depth: int = 1,
    ) -> None:
        self.opgraft_config = opgraft_config.resolved()
        self.config = self.opgraft_config.scheduler
        self.cache = cache
        self.max_model_len = max_model_len
        self.fits = fits
        self.depth = depth
        self.counters = Counters()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._parked: dict[str | None, list[Request]] = {}
        self.steps = Drafts()
        self._arrivals = count()

    @property
    def has_work(self) -> bool:
        """Tell whether a request runs or waits."""
        return bool(self._requests)

    @property
    def requests(self) -> Sequence[Request]:
        """Return those that run or wait, in the order in which they were added."""
        return list(self._requests.values())

    @property
    def num_waiting(self) -> int:
        """Return how many wait, those included that wait for the prompt that they share."""
        return len(self._requests) - len(self.running)

    def add(self, request: Request) -> None:
        """Have a request wait for its turn.

        Raises:
            RequestError: its id is in use, or it could never be served: prompt, cache and limits do
                not fit.
        """
        expect_servable(request, self._requests, self.config, self.cache, self.max_model_len)
        if request.arrival < 0:
            request.arrival = next(self._arrivals)
        request.rank = (
            request.priority if self.config.policy == "priority" else 0,
            request.arrival,
        )
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

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Forget requests that were added since the last step, as if they had not been."""
        for request in requests:
            if self._requests.get(request.request_id) is request:
                del self._requests[request.request_id]
        self.waiting = [
            each for each in self.waiting if self._requests.get(each.request_id) is each
        ]

    def schedule(self) -> Step | None:
        """Choose the tokens of the next step: of those that run, then of those that wait.

        ``None`` where others are being computed, and there is none for a further step.
        """
        draft = Draft(self.config.max_num_batched_tokens, self._part_of(len(self.running)))
        if self.fits:
            for request in [
                each for each in self.running if not each.computing and self._is_outgrown(each)
            ]:
                self._rotate_anew(request)
        made_way = self._make_way(draft)
        if self._schedule_running(draft):
            most = self._part_of(len(self._requests)) - len(draft.batch)
            self._admit(draft, min(most, 1) if made_way else most)
        if self.steps and not draft.batch:
            return None
        self.counters.prompt_tokens += draft.prompt_tokens
        self.counters.decode_tokens += (
            self.config.max_num_batched_tokens - draft.budget - draft.prompt_tokens
        )
        moves = self.cache.states.take_moves() if self.cache.states else ()
        return self.steps.make(draft, moves)

    def update(
        self, step: Step, tokens: Mapping[str, int], failed: Collection[str] = ()
    ) -> list[Request]:
        """Take the tokens that a step has sampled, the first of those that are computed; return who finishes by them.

        Args:
            step: that was computed.
            tokens: by request.
            failed: requests that end by an error of their own, and have no token.

        Raises:
            RequestError: a sequence that samples, and has not left, has no token. ``recover`` is
                due then.
        """
        draft = self.steps.take_first()
        finished = []
        for request, scheduled in zip(draft.batch, step.sequences, strict=True):
            if request is None:
                continue
            request.computing = None
            if failed and request.request_id in failed:
                request.finish_reason = "error"
                self.cache.discard(request)
                self._finish(request)
                continue
            request.num_computed += scheduled.count
            self.cache.computed(request, scheduled.start)
            if self._parked and request.num_computed >= len(request.prompt):
                self._release(request)
            if scheduled.samples:
                if (token := tokens.get(request.request_id)) is None:
                    raise no_token(request)
                if request.append(token, self.max_model_len):
                    self._finish(request)
                    finished.append(request)
        return finished

    def undo(self, step: Step | None = None) -> list[Request]:
        """Have all steps that are computed forgotten, as one was not computed to its end: that given, or the first.

        Returns its requests. Those of all steps wait and are computed anew, unless they are aborted
        now. What the steps were to remove is removed by the next one, together with what they were
        to compute.
        """
        draft = self.steps.of(step) if step or not self.steps else self.steps.first
        failed = draft.requests() if draft else []
        self.steps.forget()
        for request in [each for each in self.running if each.computing]:
            self._requeue(request)
        if self.cache.states:
            self.cache.states.forget()
        return failed

    def recover(self, step: Step | None) -> list[Request]:
        """Have all requests wait, to be computed anew, after something was raised while queues or tables changed.

        Nothing is presumed of these, so all that the cache holds is given up, and all steps that
        are computed.

        Args:
            step: the one that was updated last, or is to be, if nobody has been told of its tokens:
                they are dropped, and who ended by them goes on. ``None`` where there is none.

        Returns:
            The requests of the step.
        """
        draft = self.steps.of(step)
        batch = draft.drop_tokens() if draft else []
        for request in batch:
            if request.finish_reason is not None and request.status == "finished":
                self.counters.finished[request.finish_reason] -= 1
            self._requests[request.request_id] = request
        self.steps.forget()
        self.steps.removed += self._requests
        self.cache.clear()
        self.running, self._parked = [], {}
        for request in self._requests.values():
            request.start_anew()
            request.rotation = self._rotation(request)
        self.waiting = sorted(self._requests.values(), key=_rank)
        return batch

    def _part_of(self, number: int) -> int:
        """Return how many of so many requests a step may have, so that each of ``depth`` steps has its part."""
        most = min(number, self.config.max_num_seqs)
        return most if self.depth == 1 else -(-most // self.depth)

    def _schedule_running(self, draft: Draft) -> bool:
        """Schedule those that run, and tell whether there were blocks for all of them.

        Where there are none, the last one gives its own up. If it is the last itself, it keeps them
        and waits.
        """
        had_blocks = True
        for request in self.running:  # which gets shorter at its end only
            if self.depth > 1 and (request.computing or len(draft.batch) == draft.places):
                continue
            budget = draft.budget_of(request) if draft.kept else draft.budget
            missing = request.num_tokens - request.num_computed
            count = (
                1
                if missing == 1 and budget
                else self._count(request, request.num_computed, missing, budget)
            )
            if not count:
                continue
            while (new_blocks := self.cache.extend(request, count)) is None:
                had_blocks = False
                if request is self.running[-1]:
                    return False
                self._preempt(self.running[-1])
            draft.take(request, count, new_blocks)
        return had_blocks

    def _make_way(self, draft: Draft) -> bool:
        """Have those of a worse priority give place, blocks and tokens of the step to the first that waits.

        They give them up only where it can be admitted by that. Tells whether any was preempted.
        """
        first = self._first_waiting()
        if first is None:
            return False
        worse = self.running[bisect_right(self.running, (first.rank[0], inf), key=_rank) :]
        if not worse or self._prefix_if_room(first, worse) is None:
            return False
        before = len(self.running)
        while (prefix := self._prefix_if_room(first)) is None and worse:
            self._preempt(worse.pop())
        if prefix is not None and self.config.chunked_prefill:
            draft.kept, draft.kept_for = (
                min(first.num_tokens - prefix.num_tokens, draft.budget),
                first.rank[0],
            )
        return len(self.running) < before

    def _admit(self, draft: Draft, most: int) -> None:
        """Admit at most so many of those that wait, in order, until one does not fit: then those behind it wait too."""
        while draft.budget and most and (request := self._first_waiting()) is not None:
            if (prefix := self._prefix_if_room(request)) is None:
                return
            missing = request.num_tokens - prefix.num_tokens
            count = self._count(request, prefix.num_tokens, missing, draft.budget)
            if not count:
                return
            self._start(request, prefix, count, draft)
            most -= 1

    def _first_waiting(self) -> Request | None:
        """Return the first that may be admitted; put aside those before it whose shared prompt is being computed."""
        while self.waiting and self._awaits_parent(self.waiting[0]):
            request = self.waiting.pop(0)
            self._parked.setdefault(request.parent, []).append(request)
        return self.waiting[0] if self.waiting else None

    def _prefix_if_room(self, request: Request, without: Sequence[Request] = ()) -> Prefix | None:
        """Return what need not be computed of a request; ``None`` where it cannot be admitted.

        Args:
            request: the first that waits.
            without: requests that run and would give their places and blocks to it.
        """
        if len(self.running) - len(without) >= self.config.max_num_seqs:
            return None
        if self.cache.states and not self.cache.states.num_free + len(without):
            return None
        reserve = self._reserve() - sum(
            self.cache.num_held(each) + len(self.cache.kinds) for each in without
        )
        if self.cache.still_lacks(request, reserve):
            return None
        prefix = self._prefix(request)
        return (
            prefix
            if self.cache.fits(request, prefix, self.config.max_num_batched_tokens, reserve)
            else None
        )

    def _start(self, request: Request, prefix: Prefix, count: int, draft: Draft) -> None:
        _take_out(self.waiting, request)
        insort(self.running, request, key=_rank)
        request.status, request.num_admitted = "running", request.num_tokens
        request.num_computed = request.num_cached = prefix.num_tokens
        request.admitted = request.admitted or monotonic()
        self.counters.prefix_queries += request.num_tokens
        self.counters.prefix_hits += prefix.num_tokens
        draft.copies += self.cache.open(request, prefix)
        self.cache.extend(request, count)
        state = self.cache.states.slot(request.request_id) if self.cache.states else 0
        draft.admit(request, count, self.cache.blocks(request), state)

    def _count(self, request: Request, start: int, missing: int, budget: int) -> int:
        """Return how many of the tokens that are missing from ``start`` on a step takes that has ``budget`` left.

        Without chunks it takes all or none. A sequence that outgrew a whole step before it was
        preempted needs several.
        """
        if self.config.chunked_prefill or missing > budget == self.config.max_num_batched_tokens:
            return self.cache.chunk(request, start, min(missing, budget)) if budget else 0
        return missing if missing <= budget else 0

    def _reserve(self) -> int:
        """Return the blocks that stay free when a request is admitted: as many as those that run will ask for next.

        Without them the newcomer would soon give its blocks back, and be computed anew.
        """
        return len(self.running) * len(self.cache.kinds)

    def _awaits_parent(self, request: Request) -> bool:
        parent = self._requests.get(request.parent) if request.parent else None
        return (
            parent is not None
            and parent.status == "running"
            and parent.num_computed < len(parent.prompt)
        )

    def _prefix(self, request: Request) -> Prefix:
        """Return what need not be computed of a request: the parent's prompt, or what else the cache has."""
        if request.params.prompt_logprobs is not None:  # the logits of every position are asked for
            return self.cache.no_prefix
        parent = self._requests.get(request.parent) if request.parent else None
        shared = None
        if parent is not None and parent.status == "running" and not request.output:
            # an id may have been given anew, to another prompt
            same = (parent.rotation, parent.cache_salt) == (request.rotation, request.cache_salt)
            same = (
                same
                and parent.num_computed >= len(parent.prompt)
                and parent.prompt == request.prompt
            )
            shared = self.cache.common_prefix(request, parent) if same else None
        return shared or self.cache.longest_prefix(request)

    def _is_outgrown(self, request: Request) -> bool:
        return any(fit.outgrown(request.context, request.num_tokens) for fit in self.fits)

    def _rotation(self, request: Request) -> tuple[int, ...]:
        return tuple(fit.way(request.context) for fit in self.fits)

    def _rotate_anew(self, request: Request) -> None:
        """Have all tokens of a sequence computed for the length that it has now."""
        request.context = request.num_tokens
        request.rotation = self._rotation(request)
        request.block_hashes = []
        self._requeue(request)

    def _preempt(self, request: Request) -> None:
        if request.computing is None:  # else its state may have gone on
            self.cache.leave(request)
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
        elif request in (parked := self._parked.get(request.parent, [])):
            parked.remove(request)
        else:
            _take_out(self.waiting, request)
        self.counters.finished[str(request.finish_reason)] += 1
        request.status = "finished"
        del self._requests[request.request_id]

    def _stop(self, request: Request) -> None:
        if request.computing is not None:
            request.computing.leave(request)
        self._release(request)
        _take_out(self.running, request)
        self.cache.close(request)
        self.steps.removed.append(request.request_id)

    def _release(self, parent: Request) -> None:
        """Have those wait in the queue that were put aside until the prompt of ``parent`` is computed."""
        for request in self._parked.pop(parent.request_id, ()):
            insort(self.waiting, request, key=_rank)


def _take_out(queue: list[Request], request: Request) -> None:
    del queue[bisect_left(queue, request.rank, key=_rank)]
