"""A step in the making."""

from __future__ import annotations

from opgraft.engine.request import Request
from opgraft.engine.step import Blocks, NewSequence, Scheduled


class Draft:
    """The tokens that are left for a step, and what it holds so far.

    Args:
        budget: tokens of the step, at most.

    Attributes:
        kept: of the tokens that are left, those for a request that waits, which others of a worse priority leave alone.
        kept_for: the priority of that request.
        prompt_tokens: that it computes of prompts, or anew.
        batch: the requests of ``sequences``.
        sequences, added, copies: as of ``Step``.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.kept, self.kept_for = 0, 0
        self.prompt_tokens = 0
        self.batch: list[Request] = []
        self.sequences: list[Scheduled] = []
        self.added: list[NewSequence] = []
        self.copies: list[tuple[int, int]] = []

    def take(self, request: Request, count: int, new_blocks: Blocks) -> None:
        """Have the step compute the next ``count`` tokens of a request."""
        start = request.num_computed
        samples = start + count == request.num_tokens
        self.batch.append(request)
        self.sequences.append(Scheduled(request.request_id, start, count, new_blocks, samples))
        self.budget -= count
        if start < request.num_admitted:
            self.prompt_tokens += count

    def budget_of(self, request: Request) -> int:
        """Return the tokens that are left for a request that runs."""
        return max(self.budget - self.kept, 0) if request.rank[0] > self.kept_for else self.budget
