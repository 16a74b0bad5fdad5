"""The scheduler's records of steps: one in the making, and those under way in the workers."""

from __future__ import annotations

from collections import deque

from opgraft.engine.request import Request
from opgraft.engine.step import Blocks, NewSequence, ScheduledPart, StateMove, Step
from opgraft.errors import RequestError


class PendingStep:
    """A step in the making, and then under way: tokens and places left, and the sequences so far.

    Args:
        budget: tokens of the step, at most.
        places: running sequences of the step, at most.

    Attributes:
        budget: tokens left.
        places: running sequences, at most.
        reserved_tokens: tokens left that belong to a waiting request; running requests of a worse
            priority leave them alone.
        reserved_for_priority: priority of this waiting request.
        reserved_for_short: tokens left that long prompts leave to shorter requests; ``None`` until
            the step meets a long prompt.
        has_long: a long prompt has had its choice of tokens.
        prompt_tokens: tokens of prompts, and tokens computed anew.
        batch: the requests of ``sequences``; ``None`` in place of a request that has left since.
        left: ids of the requests that have left: see ``drop_result_of``.
        sequences, added, copies: as of ``Step``.
        step: the finished step.
        ended_before: ended requests by reason, as of ``Counters.finished``, before the update;
            ``None`` until then.
    """

    step: Step

    def __init__(self, budget: int, places: int) -> None:
        self.budget = budget
        self.places = places
        self.reserved_tokens = 0
        self.reserved_for_priority = 0
        self.reserved_for_short: int | None = None
        self.has_long = False
        self.prompt_tokens = 0
        self.batch: list[Request | None] = []
        self.left: set[str] = set()
        self.sequences: list[ScheduledPart] = []
        self.added: list[NewSequence] = []
        self.copies: list[tuple[int, int]] = []
        self.ended_before: dict[str, int] | None = None

    def take(
        self, request: Request, count: int, new_blocks: Blocks, draft: tuple[int, ...] = ()
    ) -> None:
        """Add the next ``count`` tokens of a request to the step, the last of them drafted ones."""
        start = request.num_computed
        samples = start + count >= request.num_tokens
        token = None
        # The runner received the tokens up to the admission with the sequence. Each later token
        # was sampled since, perhaps in another process, and travels with the step that computes it.
        if start < request.num_tokens_at_admission:
            self.prompt_tokens += count
        else:
            token = request.output[-1]
        request.computing = self
        self.batch.append(request)
        # The fields of ScheduledPart, in their order.
        fields = request.request_id, start, count, new_blocks, samples, token, draft
        # Half the time of a call of the class.
        self.sequences.append(tuple.__new__(ScheduledPart, fields))
        self.budget -= count

    def admit(self, request: Request, count: int, blocks: Blocks, state: int) -> None:
        """Add the next ``count`` tokens of a request unknown to the runner.

        Args:
            request: to admit.
            count: tokens to compute.
            blocks: whole tables of the request.
            state: slot of the request, if layers keep a state of each sequence.
        """
        no_new_blocks = ((),) * len(blocks)
        self.take(request, count, no_new_blocks)
        self.added.append(
            NewSequence(
                request.request_id,
                tokens=tuple(request.tokens()),
                prompt_length=len(request.prompt),
                context=request.context,
                params=request.params,
                blocks=blocks,
                arrival=request.arrival,
                eos=request.eos,
                bad_words=request.bad_words,
                grammar=request.grammar,
                state=state,
                lora=request.lora_number,
            )
        )

    def drop_result_of(self, request: Request) -> None:
        """Drop the result for a request: it was aborted, or gave its blocks to others."""
        request.computing = None
        self.batch[self.batch.index(request)] = None
        self.left.add(request.request_id)

    def requests(self) -> list[Request]:
        """Return the requests of the batch that have not left."""
        return [request for request in self.batch if request is not None]

    def drop_tokens(self) -> list[Request]:
        """Take sampled tokens off the outputs of the batch, if any, and return its requests."""
        for request, scheduled in zip(self.batch, self.sequences, strict=True):
            if request is not None and scheduled.samples:
                known = scheduled.start + scheduled.count - len(scheduled.draft)
                request.drop_output(known)
        return self.requests()

    def budget_of(self, request: Request) -> int:
        """Return the tokens left for a running request."""
        if request.rank[0] > self.reserved_for_priority:
            return max(self.budget - self.reserved_tokens, 0)
        return self.budget


class StepsUnderWay:
    """The steps under way in the workers, in their order.

    Attributes:
        removed: ids of the sequences that the next step removes.
        updated: the step of the last update.
    """

    def __init__(self) -> None:
        self.removed: list[str] = []
        self.updated: PendingStep | None = None
        self._steps: deque[PendingStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def first(self) -> PendingStep:
        """Return the oldest step."""
        return self._steps[0]

    def make(self, pending: PendingStep, moves: tuple[StateMove, ...]) -> Step:
        """Make the ``Step`` of a pending step, and add the pending step to those under way."""
        pending.step = Step(
            tuple(self.removed),
            tuple(pending.added),
            tuple(pending.copies),
            tuple(pending.sequences),
            moves,
        )
        self._steps.append(pending)
        # Not before: after an interrupt, the next step still removes these sequences.
        self.removed = []
        return pending.step

    def take_first(self) -> PendingStep:
        """Take the oldest step off the list: its result has arrived."""
        self.updated = self._steps.popleft()
        return self.updated

    def of(self, step: Step | None) -> PendingStep | None:
        """Return the record of a step under way or of the last update; ``None`` for others."""
        for pending in (self.updated, *self._steps):
            if pending is not None and pending.step is step:
                return pending
        return None

    def forget(self) -> None:
        """Forget the steps under way. The next step removes their removed sequences."""
        lost = [removed for pending in self._steps for removed in pending.step.removed]
        self.removed = [*lost, *self.removed]
        self._steps.clear()


def no_token(request: Request) -> RequestError:
    """Return the error for a step without a token for a sampling request."""
    return RequestError(
        f"the step gave no token for request {request.request_id!r}, which samples: give one for "
        "each sequence that samples, and abort those that failed before"
    )
