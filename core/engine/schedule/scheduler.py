"""The choice of the next step: continuous batching without phases.

A request has tokens and computed tokens, and each step computes some of the missing ones. There is
one rule for a prompt, a chunk of a prompt, a decode, and a sequence that starts anew after its
blocks went to others: compute the tokens that are missing, as far as the step has room.

``schedule`` makes a step of running requests first, usually one token each, and of waiting requests
with the rest of the budget. The workers compute the step, and ``update`` takes their tokens.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from math import inf
from operator import attrgetter
from time import monotonic
from types import MappingProxyType
from typing import Any

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig, SchedulerConfig
from opgraft.engine.drafting.drafting import Drafting, drafting_of
from opgraft.engine.lora.request import NO_LORA
from opgraft.engine.request import FinishReason, Request
from opgraft.engine.runner.context_fit import ContextFit
from opgraft.engine.schedule.kv_cache import KVCacheManager, Prefix
from opgraft.engine.schedule.pending_step import PendingStep, StepsUnderWay, no_token
from opgraft.engine.servable import expect_servable
from opgraft.engine.stats import Counters
from opgraft.engine.step import Step
from opgraft.errors import RequestError

_rank = attrgetter("rank")
_NONE_FURTHER: Mapping[str, Sequence[tuple[int, Any]]] = MappingProxyType({})

# The verbs of the scheduler for requests that leave a step, or the scheduler:
#
# abort       a request ends with a reason: for a user, or after its step failed.
# withdraw    requests are forgotten, and their end is not counted.
# hold        a waiting request leaves the queue, until release, as another process computes its
#             prompt.
# undo        all steps under way are taken back, after workers failed. Their requests wait again,
#             and the cache keeps its contents.
# recover     the cache is emptied, and all requests start anew, after the scheduler itself failed.
# _preempt    a running request waits, because others need its blocks.
# _requeue    a running request joins the waiting ones: a part of undo and _preempt.
# _finish     a request that has ended leaves all lists: a part of abort and update.
# _stop       a request leaves the running ones: a part of _requeue and _finish. Its blocks are
#             given back (KVCacheManager.close), and keep their contents for others.


@PluggableClass.register("scheduler")
class Scheduler(PluggableClass):
    """Running and waiting requests, each list in order, and the choice of the next step.

    The order is the order of arrival. Under the policy "priority", priorities come first, and
    arrival decides among equals. The first request in the order is scheduled and admitted first.
    The last one gives its blocks to others. So the first request always gets on, and among equals
    no request starves. A waiting request takes places and blocks from running requests of a worse
    priority, if it can then be admitted.

    Args:
        opgraft_config: all settings. Those of ``scheduler`` are the limits of a step, and the
            policy.
        cache: the tables of blocks; only the scheduler changes them.
        max_model_len: tokens of prompt and output together, at most.
        fits: ropes of the model that depend on the length of the context. They rotate the tokens of
            a prompt for the length of the prompt, and each later token for the length of the
            sequence with this token. A sequence is computed anew once its length requires another
            rotation of all keys.
        depth: number of steps under way at the same time, one behind the other, as in the stages of
            a pipeline. Each step has a part of the requests, and no request is in two steps. The
            workers compute the steps in order, so a block that is given away may be in the next
            step.
        adapters: the numbers of the adapters that the workers have, by default of all. Requests
            with another adapter wait.
    """

    def __init__(
        self,
        opgraft_config: OpgraftConfig,
        cache: KVCacheManager,
        max_model_len: int,
        fits: Sequence[ContextFit] = (),
        depth: int = 1,
        adapters: Container[int] | None = None,
    ) -> None:
        self.opgraft_config = opgraft_config.resolved()
        self.config = self.opgraft_config.scheduler
        self.cache = cache
        self.max_model_len = max_model_len
        self.context_ropes = fits
        self.depth = depth
        self.adapters = adapters
        self._longest_short = _longest_short(self.config)
        self.counters = Counters()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._held: dict[str, Request] = {}
        self._parked: dict[str | None, list[Request]] = {}
        self.under_way = StepsUnderWay()
        self.drafting = drafting_of(self.opgraft_config)
        self._arrivals = itertools.count()

    @property
    def has_work(self) -> bool:
        """Return True while a request runs or waits."""
        return bool(self._requests)

    @property
    def only_holds(self) -> bool:
        """Return True if each request is held."""
        return len(self._requests) == len(self._held)

    @property
    def requests(self) -> Sequence[Request]:
        """Return the running and waiting requests, in the order of their addition."""
        return list(self._requests.values())

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting requests, parked and held ones included."""
        return len(self._requests) - len(self.running)

    def add(self, request: Request) -> None:
        """Add a request to the waiting ones.

        Raises:
            RequestError: the id is in use, or the request could never be served: prompt, cache and
                limits do not fit.
        """
        expect_servable(request, self._requests, self.config, self.cache, self.max_model_len)
        if request.arrival < 0:
            request.arrival = next(self._arrivals)
        priority = request.priority if self.config.policy == "priority" else 0
        request.rank = (priority, request.arrival)
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
                f"request {request_id!r} cannot be aborted, as none of that id runs or waits: it "
                "has finished, or was never added; see that the id is the one that it was added by"
            )
        request.finish_reason = reason
        self._finish(request)
        return request

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Forget requests that were added since the last step, without a count."""
        for request in requests:
            if self._requests.get(request.request_id) is request:
                del self._requests[request.request_id]
        known = self._requests
        self.waiting = [each for each in self.waiting if known.get(each.request_id) is each]
        self._held = {name: each for name, each in self._held.items() if known.get(name) is each}

    def hold(self, request: Request) -> None:
        """Let a waiting request wait for ``release``, without a place in the queue."""
        _take_out(self.waiting, request)
        self._held[request.request_id] = request

    def hold_anew(self, requests: Iterable[Request]) -> None:
        """Add requests that another scheduler has held, and hold them."""
        for request in requests:
            request.start_anew()
            self.add(request)
            self.hold(request)

    def release(self, request: Request) -> None:
        """Put a held request back among the waiting ones. Other requests stay."""
        if self._held.get(request.request_id) is request:
            del self._held[request.request_id]
            insort(self.waiting, request, key=_rank)

    def schedule(self) -> Step | None:
        """Choose the tokens of the next step: of running requests, then of waiting ones.

        Returns:
            The step; empty if there are no requests. ``None`` if other steps are under way, and no
            request is left for another one.
        """
        places = self._share_of_a_step(len(self.running))
        pending = PendingStep(self.config.max_num_batched_tokens, places)
        if self.context_ropes:
            self._rotate_outgrown()
        preempted = self._make_way(pending)
        if self._schedule_running(pending):
            # Some of the short requests have their tokens now.
            pending.reserved_for_short = None
            number = len(self._requests) - len(self._held)
            most = self._share_of_a_step(number) - len(pending.batch)
            # After a preemption, only the request that it was for is admitted.
            self._admit(pending, min(most, 1) if preempted else most)
        # With nothing under way, the step may be empty: workers still remove finished sequences,
        # and run their experts for other replicas (``parallel.in_rounds``).
        if self.under_way and not pending.batch:
            return None
        taken = self.config.max_num_batched_tokens - pending.budget
        self.counters.prompt_tokens += pending.prompt_tokens
        self.counters.decode_tokens += taken - pending.prompt_tokens
        moves = self.cache.states.take_moves() if self.cache.states else ()
        return self.under_way.make(pending, moves)

    def update(
        self,
        step: Step,
        tokens: Mapping[str, int],
        failed: Collection[str] = (),
        further: Mapping[str, Sequence[tuple[int, Any]]] = _NONE_FURTHER,
    ) -> list[Request]:
        """Append the sampled tokens of a step to their requests. Return the requests that end so.

        Failed requests end, too, and are not returned.

        Args:
            step: the oldest step under way.
            tokens: by request.
            failed: requests that end with an error of their own, and have no token.
            further: as of ``StepResult``.

        Raises:
            RequestError: a sampling sequence has no token, and has not left, or further tokens are
                not those of its draft. Call ``recover`` then.
        """
        pending = self.under_way.take_first()
        pending.ended_before = dict(self.counters.finished)
        finished = []
        for request, scheduled in zip(pending.batch, step.sequences, strict=True):
            # Aborted or preempted while the step was computed.
            if request is None:
                continue
            request.computing = None
            if failed and request.request_id in failed:
                request.finish_reason = "error"
                self.cache.discard(request)
                self._finish(request)
                continue
            token = tokens.get(request.request_id)
            request.num_computed += scheduled.count
            if scheduled.draft and token is not None:
                sampled = [token, *(each for each, _ in further.get(request.request_id, ()))]
                token = self._accept(request, scheduled.draft, sampled)
            self.cache.computed(request, scheduled.start)
            if self._parked and request.num_computed >= len(request.prompt):
                self._unpark(request)
            if not scheduled.samples:
                continue
            if token is None:
                raise no_token(request)
            if request.append(token, self.max_model_len):
                self._finish(request)
                finished.append(request)
        return finished

    def _accept(self, request: Request, draft: Sequence[int], sampled: list[int]) -> int:
        """Append the accepted tokens of a draft. The step has computed them already.

        Args:
            request: of the draft.
            draft: of the step.
            sampled: accepted tokens, and one token after them.

        Returns:
            The last sampled token, to be computed by the next step.

        Raises:
            RequestError: accepted tokens are not those of the draft, or one ends the request.
        """
        last = sampled.pop()
        ended = [request.append(token, self.max_model_len) for token in sampled]
        if tuple(sampled) != tuple(draft[: len(sampled)]) or any(ended):
            raise RequestError(
                f"the step gave the tokens {[*sampled, last]} for request {request.request_id!r} "
                f"with the draft {[*draft]}: give those that the draft has, as far as none ends "
                "the request, and one more"
            )
        request.num_computed -= len(draft) - len(sampled)
        self.counters.drafts += 1
        self.counters.draft_tokens += len(draft)
        self.counters.accepted_tokens += len(sampled)
        return last

    def undo(self, step: Step | None = None) -> list[Request]:
        """Take all steps under way back, after the computation of one of them failed.

        The requests of all steps wait again, unless they are aborted now. The next step removes
        the sequences of these steps from the runner.

        Args:
            step: the failed one; by default, the oldest.

        Returns:
            The requests of the failed step.
        """
        if step is None and self.under_way:
            pending: PendingStep | None = self.under_way.first
        else:
            pending = self.under_way.of(step)
        failed = pending.requests() if pending else []
        self.under_way.forget()
        computing = [each for each in self.running if each.computing]
        for request in computing:
            self._requeue(request)
        if self.cache.states:
            self.cache.states.forget()
        return failed

    def recover(self, step: Step | None) -> list[Request]:
        """Let all requests wait and start anew, after an error while queues or tables changed.

        Nothing in queues and tables can be trusted then. So the cache loses all contents, and all
        steps under way are dropped.

        Args:
            step: the step of the update that failed, or ``None``. If ``update`` failed half-way,
                its tokens are removed again, and requests that it had finished are revived.

        Returns:
            The requests of the step.
        """
        pending = self.under_way.of(step)
        batch = pending.drop_tokens() if pending else []
        # The update ended some of them, and an interrupt may have come before or after the count.
        if pending is not None and pending.ended_before is not None:
            self.counters.finished = pending.ended_before
        for request in batch:
            self._requests[request.request_id] = request
        self.under_way.forget()
        self.under_way.removed += self._requests
        self.cache.clear()
        if self.drafting is not None:
            self.drafting.forget_all()
        self.running = []
        self._parked = {}
        self._held = {}
        for request in self._requests.values():
            request.start_anew()
            request.rotation = self._rotation(request)
        self.waiting = sorted(self._requests.values(), key=_rank)
        return batch

    def _share_of_a_step(self, number: int) -> int:
        """Return the most requests of a step, if ``number`` requests share ``depth`` steps."""
        most = min(number, self.config.max_num_seqs)
        if self.depth == 1:
            return most
        return -(-most // self.depth)

    def _schedule_running(self, pending: PendingStep) -> bool:
        """Add running requests to a step, and return True if there were blocks for all of them.

        If blocks run out, the last running request gives up its blocks. A last request that lacks
        blocks itself keeps those it has: it goes on running, and misses this step.
        """
        had_blocks = True
        drafting = self._drafting_now()
        # Preemption shortens the list at its end only, so the loop stays valid.
        for request in self.running:
            if self.depth > 1 and (request.computing or len(pending.batch) == pending.places):
                continue
            budget = pending.budget_of(request) if pending.reserved_tokens else pending.budget
            missing = request.num_tokens - request.num_computed
            # A decode, by far the most frequent case, needs no look at chunks.
            count = 1
            draft: tuple[int, ...] = ()
            if missing != 1 or not budget:
                room = self._room(request, missing, budget, pending)
                count = self._count(request, request.num_computed, missing, room)
            elif drafting is not None:
                draft = self._draft(drafting, request, budget)
                count += len(draft)
            if not count:
                continue
            while (new_blocks := self.cache.extend(request, count)) is None:
                had_blocks = False
                if request is self.running[-1]:
                    return False
                self._preempt(self.running[-1])
            pending.take(request, count, new_blocks, draft)
        return had_blocks

    def _drafting_now(self) -> Drafting | None:
        """Return the drafting; ``None`` if the next step may compute tokens of prompts.

        Drafts would take their places in the step.
        """
        if self.drafting is None:
            return None
        may_admit = self.waiting and len(self.running) < self.config.max_num_seqs
        if may_admit or any(each.num_tokens - each.num_computed > 1 for each in self.running):
            return None
        return self.drafting

    def _draft(self, drafting: Drafting, request: Request, budget: int) -> tuple[int, ...]:
        """Return a draft of the next tokens of a running request; empty if none pays.

        The request has room for one token more, because one is sampled after the draft.
        """
        # After its admission, the runner has all tokens already, and takes none with the step.
        if request.num_computed < request.num_tokens_at_admission:
            return ()
        longest = min(request.num_most, self.max_model_len)
        # Each running request has its token of the step, and nobody gives up blocks for a guess.
        room = self.cache.room_beside(request, self._reserve()) - 1
        most = min(longest - request.num_tokens - 1, budget - len(self.running), room)
        if most < 1:
            return ()
        draft = drafting.draft(request, most, len(self.running))
        # Behind this length all keys are rotated in another way.
        if self.context_ropes and self._is_outgrown(request, len(draft)):
            return ()
        return draft

    def _make_way(self, pending: PendingStep) -> bool:
        """Preempt requests of a worse priority than the first waiting one, and return True if any.

        Places, blocks and tokens of this step become free. Nothing happens if the waiting
        request cannot be admitted even so.
        """
        first = self._first_waiting()
        if first is None:
            return False
        priority = first.rank[0]
        worse = self.running[bisect_right(self.running, (priority, inf), key=_rank) :]
        if not worse or self._prefix_if_room(first, worse) is None:
            return False
        before = len(self.running)
        if not self._has_lora_place(first):
            for each in self._of_smallest_adapter(worse):
                worse.remove(each)
                self._preempt(each)
        prefix = self._prefix_if_room(first)
        while prefix is None and worse:
            self._preempt(worse.pop())
            prefix = self._prefix_if_room(first)
        if prefix is not None and self.config.chunked_prefill:
            pending.reserved_tokens = min(first.num_tokens - prefix.num_tokens, pending.budget)
            pending.reserved_for_priority = priority
        return len(self.running) < before

    def _of_smallest_adapter(self, worse: Sequence[Request]) -> Sequence[Request]:
        """Return the fewest requests among ``worse`` that free a slot: all those of one adapter."""
        of_adapter: dict[int, list[Request]] = {}
        for each in self.running:
            of_adapter.setdefault(each.lora_number, []).append(each)
        of_adapter.pop(NO_LORA, None)
        known = {each.request_id for each in worse}
        return min(
            (each for each in of_adapter.values() if {one.request_id for one in each} <= known),
            key=len,
        )

    def _admit(self, pending: PendingStep, most: int) -> None:
        """Admit waiting requests in order, at most ``most``, until the first misfit.

        Requests behind this one wait too, even if they would fit. Otherwise a long prompt might
        wait for ever. Two kinds count as no misfit: requests that only lack a slot for an adapter,
        and long prompts that leave their room to shorter requests.
        """
        while pending.budget and most:
            request = self._first_with_slot()
            if request is None:
                return
            prefix = self._prefix_if_room(request)
            if prefix is None:
                return
            missing = request.num_tokens - prefix.num_tokens
            room = self._room(request, missing, pending.budget, pending)
            if not room:
                request = self._first_short(request.rank[0])
                prefix = None if request is None else self._prefix_if_room(request)
                if request is None or prefix is None:
                    return
                missing = request.num_tokens - prefix.num_tokens
                room = pending.budget
            count = self._count(request, prefix.num_tokens, missing, room)
            if not count:
                return
            self._start(request, prefix, count, pending)
            if pending.reserved_for_short and missing <= self._longest_short:
                pending.reserved_for_short = max(pending.reserved_for_short - count, 0)
            most -= 1

    def _room(self, request: Request, missing: int, budget: int, pending: PendingStep) -> int:
        """Return the tokens of a step that a request may take.

        A long prompt leaves to shorter requests what they want, up to the length of a short one.
        The first long prompt of a step leaves at most half of what is left.

        Args:
            request: running, or the first waiting one.
            missing: tokens of the request.
            budget: tokens left for the request, if it is short.
            pending: the step.
        """
        if missing <= self._longest_short or not self.config.chunked_prefill:
            return budget
        # Others were preempted for this one.
        if pending.reserved_tokens and request.rank[0] <= pending.reserved_for_priority:
            return budget
        if pending.reserved_for_short is None:
            pending.reserved_for_short = self._wanted_by_short(request)
        room = max(pending.budget - pending.reserved_for_short, 0)
        # One long prompt gets on in each step, however many short requests come.
        if not pending.has_long:
            room = max(room, (pending.budget + 1) // 2)
        pending.has_long = True
        return min(budget, room)

    def _wanted_by_short(self, long: Request) -> int:
        """Return the tokens that short requests want and the step has not yet, up to a limit.

        Args:
            long: runs, or is the first waiting one that is admitted. Requests of a worse priority
                do not count.
        """
        most = self._longest_short
        wanted = 0
        # Without a place or blocks for the first one, no waiting request is admitted.
        has_room = long.status == "waiting"
        if not has_room:
            first = self._first_with_slot()
            has_room = first is not None and self._prefix_if_room(first) is not None
        waiting = self.waiting if has_room else ()
        for request in itertools.chain(self.running, waiting):
            if request.rank[0] > long.rank[0]:
                continue
            missing = request.num_tokens - request.num_computed
            if missing <= most and request.computing is None:
                wanted += missing
                if wanted >= most:
                    return most
        return wanted

    def _first_short(self, priority: int) -> Request | None:
        """Return the first waiting request of a priority that may overtake long prompts."""
        for request in self.waiting:
            is_short = request.num_tokens <= self._longest_short and request.rank[0] == priority
            if is_short and self._has_lora_place(request) and not self._awaits_parent(request):
                return request
        return None

    def _first_waiting(self) -> Request | None:
        """Return the first request that may be admitted.

        Requests before that one share a prompt with a running request. They are parked until the
        prompt is computed.
        """
        while self.waiting and self._awaits_parent(self.waiting[0]):
            request = self.waiting.pop(0)
            self._parked.setdefault(request.parent, []).append(request)
        return self.waiting[0] if self.waiting else None

    def _first_with_slot(self) -> Request | None:
        """Return the first request that may be admitted, and whose adapter may run.

        Behind a request that waits for a slot, only requests without an adapter overtake it. So
        slots become free for it.
        """
        first = self._first_waiting()
        if first is None or self._has_lora_place(first):
            return first
        plain = (each for each in self.waiting if each.lora is None)
        return next((each for each in plain if not self._awaits_parent(each)), None)

    def _prefix_if_room(self, request: Request, without: Sequence[Request] = ()) -> Prefix | None:
        """Return the computed beginning of a waiting request; ``None`` if there is no room for it.

        Args:
            request: the first waiting one that has a slot or needs none.
            without: running requests that would give up their places and blocks.
        """
        if len(self.running) - len(without) >= self.config.max_num_seqs:
            return None
        states = self.cache.states
        if states and not states.num_free + len(without):
            return None
        if not self._has_lora_place(request, without):
            return None
        groups = len(self.cache.kinds)
        # Each of them gives up its blocks, and needs no reserve any more.
        given_up = sum(self.cache.num_held(each) + groups for each in without)
        reserve = self._reserve() - given_up
        if self.cache.still_lacks(request, reserve):
            return None
        prefix = self._prefix(request)
        if not self.cache.fits(request, prefix, self.config.max_num_batched_tokens, reserve):
            return None
        return prefix

    def _has_lora_place(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """Return True if the adapter of a request, if any, may run beside the running ones."""
        if request.lora is None:
            return True
        if self.adapters is not None and request.lora_number not in self.adapters:
            return False
        given_up = set(map(id, without))
        numbers = {each.lora_number for each in self.running if id(each) not in given_up}
        numbers.discard(NO_LORA)
        most = self.opgraft_config.lora.max_loras
        return request.lora_number in numbers or len(numbers) < most

    def _start(self, request: Request, prefix: Prefix, count: int, pending: PendingStep) -> None:
        """Move a request from the waiting to the running ones, and add it to a step."""
        _take_out(self.waiting, request)
        insort(self.running, request, key=_rank)
        request.status = "running"
        request.num_tokens_at_admission = request.num_tokens
        request.num_computed = prefix.num_tokens
        request.num_cached = prefix.num_tokens
        request.admitted = request.admitted or monotonic()
        self.counters.prefix_queries += request.num_tokens
        self.counters.prefix_hits += prefix.num_tokens
        pending.copies += self.cache.open(request, prefix)
        # There are enough blocks: ``KVCacheManager.fits`` has found room for the whole sequence.
        self.cache.extend(request, count)
        state = self.cache.states.slot(request.request_id) if self.cache.states else 0
        pending.admit(request, count, self.cache.blocks(request), state)

    def _count(self, request: Request, start: int, missing: int, budget: int) -> int:
        """Return the number of missing tokens that a step computes.

        Args:
            request: of the tokens.
            start: position of the first missing token.
            missing: number of missing tokens.
            budget: tokens left in the step.
        """
        # Without chunks, a step takes all or none. But a sequence that outgrew a whole step before
        # its preemption needs several steps.
        is_whole_step = budget == self.config.max_num_batched_tokens
        needs_chunks = is_whole_step and missing > budget
        if not self.config.chunked_prefill and not needs_chunks:
            return missing if missing <= budget else 0
        if not budget:
            return 0
        return self.cache.chunk(request, start, min(missing, budget))

    def _reserve(self) -> int:
        """Return the blocks to leave free when a request is admitted: the next of running requests.

        Without this reserve, a new request would soon give its blocks back and start anew.
        """
        return len(self.running) * len(self.cache.kinds)

    def _awaits_parent(self, request: Request) -> bool:
        """Return True while a running request computes the shared prompt of a waiting one."""
        parent = self._requests.get(request.parent) if request.parent else None
        if parent is None or parent.status != "running":
            return False
        return parent.num_computed < len(parent.prompt)

    def _prefix(self, request: Request) -> Prefix:
        """Return the computed beginning of a request: the parent's prompt, or one in the cache."""
        # These need the logits of every position of the prompt.
        if request.params.prompt_logprobs is not None:
            return self.cache.no_prefix
        parent = self._requests.get(request.parent) if request.parent else None
        if parent is not None and _shares_prompt(request, parent):
            shared = self.cache.common_prefix(request, parent)
            if shared:
                return shared
        return self.cache.longest_prefix(request)

    def _rotate_outgrown(self) -> None:
        """Start the running sequences anew that have outgrown the rotation of their keys."""
        outgrown = [each for each in self.running if not each.computing and self._is_outgrown(each)]
        for request in outgrown:
            request.context = request.num_tokens
            request.rotation = self._rotation(request)
            request.block_hashes = []
            request.was_sought = False
            self._requeue(request)

    def _is_outgrown(self, request: Request, drafted: int = 0) -> bool:
        length = request.num_tokens + drafted
        return any(rope.outgrown(request.context, length) for rope in self.context_ropes)

    def _rotation(self, request: Request) -> tuple[int, ...]:
        return tuple(rope.way(request.context) for rope in self.context_ropes)

    def _preempt(self, request: Request) -> None:
        # A step under way may have changed the state already.
        if request.computing is None:
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
        parked = self._parked.get(request.parent, [])
        if request.status == "running":
            self._stop(request)
        elif request in parked:
            parked.remove(request)
        elif self._held.get(request.request_id) is request:
            del self._held[request.request_id]
        else:
            _take_out(self.waiting, request)
        if self.drafting is not None:
            self.drafting.forget(request)
        self.counters.finished[str(request.finish_reason)] += 1
        request.status = "finished"
        del self._requests[request.request_id]

    def _stop(self, request: Request) -> None:
        """Take a request off the running ones, and give its blocks back."""
        if request.computing is not None:
            request.computing.drop_result_of(request)
        self._unpark(request)
        _take_out(self.running, request)
        self.cache.close(request)
        self.under_way.removed.append(request.request_id)

    def _unpark(self, parent: Request) -> None:
        """Put the requests parked for the prompt of ``parent`` back among the waiting ones."""
        for request in self._parked.pop(parent.request_id, ()):
            insort(self.waiting, request, key=_rank)


def _longest_short(config: SchedulerConfig) -> int:
    """Return the most missing tokens of a request that long prompts leave room for."""
    given = config.long_prefill_token_threshold
    if given is None:
        return config.max_num_batched_tokens // 4
    # With 0, no prompt is long.
    return given or sys.maxsize


def _shares_prompt(request: Request, parent: Request) -> bool:
    """Return True if a request may start with the blocks of its parent's prompt."""
    if parent.status != "running" or request.output:
        return False
    # The parent may have ended, and its id may name a request with another prompt now.
    if (parent.rotation, parent.cache_salt) != (request.rotation, request.cache_salt):
        return False
    if parent.lora_digest != request.lora_digest:
        return False
    is_computed = parent.num_computed >= len(parent.prompt)
    return is_computed and parent.prompt == request.prompt


def _take_out(queue: list[Request], request: Request) -> None:
    del queue[bisect_left(queue, request.rank, key=_rank)]
