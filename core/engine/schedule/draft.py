"""Steps: one in the making, and those that are being computed."""

from __future__ import annotations

from collections import deque

from opgraft.engine.request import Request
from opgraft.engine.step import Blocks, NewSequence, Scheduled, StateMove, Step
from opgraft.errors import RequestError


class Draft:
    """The tokens and places that are left for a step, and what it holds so far.

    Args:
        budget: tokens of the step, at most.
        places: sequences of those that run, at most.

    Attributes:
        kept: of the tokens that are left, those for a request that waits, which others of a worse
            priority leave alone.
        kept_for: the priority of that request.
        prompt_tokens: that it computes of prompts, or anew.
        batch: the requests of ``sequences``; ``None`` in the place of each that has left since.
        left: the ids of those.
        sequences, added, copies: as of ``Step``.
        step: what was made of it.
    """

    step: Step

    def __init__(self, budget: int, places: int) -> None:
        self.budget = budget
        self.places = places
        self.kept, self.kept_for = 0, 0
        self.prompt_tokens = 0
        self.batch: list[Request | None] = []
        self.left: set[str] = set()
        self.sequences: list[Scheduled] = []
        self.added: list[NewSequence] = []
        self.copies: list[tuple[int, int]] = []

    def take(self, request: Request, count: int, new_blocks: Blocks) -> None:
        """Have the step compute the next ``count`` tokens of a request."""
        start = request.num_computed
        samples = start + count == request.num_tokens
        token = None
        if start < request.num_admitted:
            self.prompt_tokens += count
        else:
            token = request.output[-1]
        request.computing = self
        self.batch.append(request)
        fields = request.request_id, start, count, new_blocks, samples, token
        # Half the time of a call of the class.
        self.sequences.append(tuple.__new__(Scheduled, fields))
        self.budget -= count

    def admit(self, request: Request, count: int, blocks: Blocks, state: int) -> None:
        """Have the step compute the next ``count`` tokens of a request that the runner does not know.

        Args:
            request: that is admitted.
            count: of its tokens.
            blocks: its whole tables.
            state: its slot, where layers keep a state of a sequence.
        """
        self.take(request, count, ((),) * len(blocks))
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
            )
        )

    def leave(self, request: Request) -> None:
        """Have what the step computes of a request dropped: it was aborted, or gave its blocks to others."""
        request.computing = None
        self.batch[self.batch.index(request)] = None
        self.left.add(request.request_id)

    def requests(self) -> list[Request]:
        """Return those of the batch that have not left."""
        return [request for request in self.batch if request is not None]

    def drop_tokens(self) -> list[Request]:
        """Drop the tokens that the step has sampled, if they have been taken in; return those of the batch."""
        for request, scheduled in zip(self.batch, self.sequences, strict=True):
            if request is not None and scheduled.samples:
                request.drop_output(scheduled.start + scheduled.count)
        return self.requests()

    def budget_of(self, request: Request) -> int:
        """Return the tokens that are left for a request that runs."""
        return max(self.budget - self.kept, 0) if request.rank[0] > self.kept_for else self.budget


class Drafts:
    """The steps that are being computed, in their order, as drafts.

    Attributes:
        removed: ids of sequences that the next step removes.
        updated: the step whose tokens were taken in last.
    """

    def __init__(self) -> None:
        self.removed: list[str] = []
        self.updated: Draft | None = None
        self._drafts: deque[Draft] = deque()

    def __len__(self) -> int:
        return len(self._drafts)

    @property
    def first(self) -> Draft:
        """Return that which was made first."""
        return self._drafts[0]

    def make(self, draft: Draft, moves: tuple[StateMove, ...]) -> Step:
        """Make a step of a draft, which is computed from now on."""
        removed = tuple(self.removed)
        draft.step = Step(
            removed, tuple(draft.added), tuple(draft.copies), tuple(draft.sequences), moves
        )
        self._drafts.append(draft)
        self.removed = []  # not before: an interrupt must not lose whom nobody removes
        return draft.step

    def take_first(self) -> Draft:
        """Return the first, which is computed."""
        self.updated = self._drafts.popleft()
        return self.updated

    def of(self, step: Step | None) -> Draft | None:
        """Return the draft of a step that is computed or was updated last; ``None`` for any other."""
        known = (each for each in (self.updated, *self._drafts) if each is not None)
        return next((each for each in known if each.step is step), None)

    def forget(self) -> None:
        """Forget the steps that are computed; what they were to remove is left for the next one."""
        self.removed = [
            *(name for draft in self._drafts for name in draft.step.removed),
            *self.removed,
        ]
        self._drafts.clear()


def no_token(request: Request) -> RequestError:
    """Return the error for a step that has sampled no token for a request."""
    return RequestError(
        f"the step gave no token for request {request.request_id!r}, which samples: give one for each sequence "
        "that samples, and abort those that failed before"
    )
