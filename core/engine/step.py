"""One step of the engine on its way from the scheduler to the runner and back.

A step is plain data without tensors, so it can be sent to another process. A step names changes
only: the runner keeps the tokens and tables of each sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from opgraft.engine.sampling_params import SamplingParams

Blocks = tuple[tuple[int, ...], ...]
"""Ids of blocks: a tuple for each group of layers, in the order of the tokens in the blocks."""

StateMove = tuple[int | None, int]
"""Slots of states: copy the first to the second. If the first is ``None``, zero the second."""


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence unknown to the runner: new, or resumed after a preemption.

    Attributes:
        request_id: of its request.
        tokens: prompt and outputs so far.
        prompt_length: tokens of the prompt.
        context: as ``Request.context``, for ropes that depend on the length of the context.
        params: settings of sampling.
        blocks: the whole table, with the blocks for this step. Blocks before a sliding window are
            zeros; nobody reads such entries.
        arrival: number in the order of arrival. If ``params.seed`` is ``None``, this number seeds
            the random numbers.
        eos: tokens that end the sequence unless ``params.ignore_eos``.
        bad_words: ``params.bad_words`` as tokens.
        grammar: compiled from ``params.structured_output``.
        state: slot of the sequence, if layers keep a state of each sequence.
        lora: number of the adapter; 0 without one.
    """

    request_id: str
    tokens: tuple[int, ...]
    prompt_length: int
    context: int
    params: SamplingParams
    blocks: Blocks
    arrival: int
    eos: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Any = None
    state: int = 0
    lora: int = 0


class ScheduledPart(NamedTuple):
    """The part of a sequence in one step.

    A named tuple is cheap to make: each sequence and step has one.

    For example, a prompt of 5 tokens is ``ScheduledPart(id, start=0, count=5, samples=True)``. The
    next step has ``start=5, count=1`` and the sampled ``token``.

    Attributes:
        request_id: of its request.
        start: tokens computed before, those of a reused prefix included.
        count: tokens to compute, drafted ones included.
        new_blocks: blocks appended to the tables since the last step; empty if the sequence is
            among ``Step.added``.
        samples: True to sample from the logits of the last token. False for a chunk of a prompt
            before its last one.
        token: the token to compute, if it was sampled after the sequence was added.
        draft: tokens that may follow ``token``. The step computes them too, and samples after each
            one that the sampler has chosen itself.
    """

    request_id: str
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    new_blocks: Blocks
    samples: bool
    token: int | None = None
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that changes for the runner.

    The runner applies the changes in this order: it removes sequences, adds sequences, appends the
    tokens and new blocks of ``sequences`` to its tables, copies blocks, and moves states. Then it
    computes the tokens of ``sequences``.

    Attributes:
        removed: finished, aborted and preempted sequences. An added sequence may
            have the same id. After a failed step, the runner may not know a removed sequence.
        added: sequences new to the runner.
        copies: pairs of blocks. Copy the content of the first to the second.
        sequences: the batch.
        states: copies and zeroing of slots of states. A slot may occur more than once, so the order
            counts.
    """

    removed: tuple[str, ...]
    added: tuple[NewSequence, ...]
    copies: tuple[tuple[int, int], ...]
    sequences: tuple[ScheduledPart, ...]
    states: tuple[StateMove, ...] = ()

    def parts(self) -> tuple[Any, ...]:
        """Return the arguments of ``step_of`` for an equal step.

        If no sequence is added, all of them are tuples, numbers and texts.
        """
        sequences = tuple(map(tuple, self.sequences))
        return self.removed, self.added, self.copies, sequences, self.states

    def __reduce__(self) -> tuple[Any, ...]:
        # Plain tuples take a third of the time, and processors wait while a step is sent.
        return step_of, self.parts()


def step_of(removed: Any, added: Any, copies: Any, sequences: Any, states: Any) -> Step:
    """Return the step of these parts, as ``Step.parts`` gives them."""
    return Step(removed, added, copies, tuple(map(ScheduledPart._make, sequences)), states)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step, by request.

    Attributes:
        tokens: the token of each sampling sequence, failed ones left out.
        logprobs: log-probabilities by request, if asked for.
        errors: the reason for each request that failed alone, such as NaN among its logits.
        refused: failed requests with an impossible wish, such as a grammar without a next token.
        prompt_logprobs: log-probabilities of a whole prompt, in the last step of the prompt, if
            asked for.
        seconds: time by part of the step. Parts that are not in ``stats.PARTS`` do not count.
        op_seconds: time by op, kernel and provider, in the steps that are chosen for this.
        further: for sequences with a draft, the tokens after the first one, each with its
            log-probabilities or ``None``. All but the last are tokens of the draft. No token
            follows one that ends the request.
    """

    tokens: Mapping[str, int]
    logprobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    refused: Set[str] = frozenset()
    further: Mapping[str, Sequence[tuple[int, Any]]] = dataclasses.field(default_factory=dict)
    op_seconds: Mapping[tuple[str, str, str], float] = dataclasses.field(default_factory=dict)
