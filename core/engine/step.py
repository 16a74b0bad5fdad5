"""One step of the engine, as it goes from the scheduler to the runner and back: plain data, changes only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from opgraft.engine.sampling_params import SamplingParams

Blocks = tuple[tuple[int, ...], ...]
"""Ids of blocks, for each kind of layers one tuple in the order of the tokens that they hold."""

StateMove = tuple[int | None, int]
"""Slots of states: the first's content is copied to the second, which is zeroed for ``None``."""


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the runner does not know: new, or resumed after it was preempted.

    Attributes:
        tokens: prompt and outputs so far.
        prompt_length: tokens of the prompt.
        context: length of the context that its first tokens are rotated for, by ropes that depend
            on it.
        blocks: the whole table, with what this step writes to. Before a sliding window stand zeros,
            which nobody reads.
        arrival: its number in the order of arrival, which seeds random numbers where
            ``params.seed`` is ``None``.
        eos: tokens that end it unless ``params.ignore_eos``.
        bad_words: ``params.bad_words`` as tokens.
        grammar: compiled from ``params.structured_output``.
        state: its slot, where layers keep a state of a sequence.
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


class Scheduled(NamedTuple):
    """The part of a sequence that a step computes; a named tuple, as one is made per sequence and step.

    Attributes:
        start: tokens computed before, those of a reused prefix included.
        count: tokens that the step computes.
        new_blocks: appended to the tables since the last step; empty where the sequence is among
            the added.
        samples: the logits of the last token are sampled. Otherwise it is a chunk after which known
            tokens follow.
        token: the one that the step computes, where it was sampled after the sequence was added.
    """

    request_id: str
    start: int
    count: int  # type: ignore[assignment]  # instead of tuple.count, which nobody calls
    new_blocks: Blocks
    samples: bool
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that changes for the runner, which goes through it in the order of the attributes.

    Attributes:
        removed: sequences that have finished, or were aborted or preempted. An added one may have
            the same id. After a step that was not computed to its end, the runner may not know one.
        added: sequences that are new to the runner.
        copies: pairs of blocks; the first's content is copied to the second before anything is
            computed.
        sequences: the batch.
        states: what happens to the slots of states, in this order, before anything is computed.
    """

    removed: tuple[str, ...]
    added: tuple[NewSequence, ...]
    copies: tuple[tuple[int, int], ...]
    sequences: tuple[Scheduled, ...]
    states: tuple[StateMove, ...] = ()

    def parts(self) -> tuple[Any, ...]:
        """Return what ``step_of`` makes the step of again: tuples, numbers and texts, where no sequence is added."""
        return self.removed, self.added, self.copies, tuple(map(tuple, self.sequences)), self.states

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle plain tuples, which takes a third of the time: a step is sent while processors wait for it."""
        return step_of, self.parts()


def step_of(removed: Any, added: Any, copies: Any, sequences: Any, states: Any) -> Step:
    """Return the step that has these parts."""
    return Step(removed, added, copies, tuple(map(Scheduled._make, sequences)), states)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step, by request.

    Attributes:
        tokens: the token of each sequence that samples and did not fail.
        logprobs: the log-probabilities of those that ask for them.
        errors: the reason for each request that failed alone, such as logits that are NaN.
        refused: those of them that failed by what they ask for, such as a grammar that leads
            nowhere.
        prompt_logprobs: of the prompts that this step has come to the end of, for who asks for
            them.
        seconds: time by part of the step; a runner names those of ``stats.PARTS`` that it knows,
            others do not count.
    """

    tokens: Mapping[str, int]
    logprobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    refused: Set[str] = frozenset()
