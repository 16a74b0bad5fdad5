"""Results of requests, by the names of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO


@dataclass(frozen=True, slots=True)
class Logprob:
    """One of the likeliest tokens at a place, or the one that was sampled there.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the likeliest.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds of ``time.monotonic()``; None where it did not get so far."""

    arrival: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def time_in_queue(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.arrival

    def snapshot(self) -> RequestMetrics:
        """Return a copy that does not change."""
        return RequestMetrics(self.arrival, self.admitted, self.first_token, self.last_token)


@dataclass(slots=True)
class CompletionOutput:
    """One answer of a request.

    Attributes:
        index: among the ``n`` answers.
        text: up to the stop string, if one ended it.
        token_ids: of the answer, those of a stop string included.
        cumulative_logprob: sum of the sampled tokens' logprobs, where they were asked for.
        logprobs: at each place, by token id, where they were asked for.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``; None while it goes on.
        stop_reason: the stop string or the stop token; None for the model's own end.
        error: what failed, where ``finish_reason`` is ``error``.
        refused: whether it failed by what the request asks for, such as a grammar that leads
            nowhere.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    refused: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def snapshot(self) -> CompletionOutput:
        """Return a copy that does not grow."""
        return CompletionOutput(
            self.index,
            self.text,
            self.token_ids.copy(),
            self.cumulative_logprob,
            self.logprobs and self.logprobs.copy(),
            self.finish_reason,
            self.stop_reason,
            self.error,
            self.refused,
        )

    def deferred_snapshot(self) -> Callable[[], CompletionOutput]:
        """Return a function that makes the copy of now, whenever it is called."""
        return self.snapshot


class GrowingOutput(CompletionOutput):
    """An answer to which tokens and text are added, at the same cost however long it is.

    Its text is put together when it is read, in the thread that adds to it.

    Args:
        index: among the ``n`` answers.
        written: returns the text so far, which somebody else adds to.
    """

    __slots__ = ("_written",)

    def __init__(self, index: int, written: Callable[[], StringIO]) -> None:
        super().__init__(index)
        self._written = written

    @property
    def text(self) -> str:
        return self._written().getvalue()

    @text.setter
    def text(self, text: str) -> None:
        written = StringIO()
        written.write(text)
        self._written = lambda: written

    def deferred_snapshot(self) -> Callable[[], CompletionOutput]:
        """Return a function that makes the copy of now, whenever it is called and in whichever thread.

        Text and lists only ever grow, so their lengths of now are all that is kept of them.
        """
        written = self._written()
        characters = written.tell()
        tokens, logprobs = len(self.token_ids), self.logprobs
        places = len(logprobs or ())
        ended = self.finish_reason, self.stop_reason, self.error, self.refused
        cumulative = self.cumulative_logprob
        return lambda: CompletionOutput(
            self.index,
            written.getvalue()[:characters],
            self.token_ids[:tokens],
            cumulative,
            logprobs and logprobs[:places],
            *ended,
        )


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers so far.

    Attributes:
        prompt: None where it was given as token ids.
        prompt_logprobs: at each place, where they were asked for; the first is None, for nothing
            comes before it.
        finished: whether all answers are.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None

    def snapshot(self) -> RequestOutput:
        """Return a copy that does not grow; what never changes is shared."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [answer.snapshot() for answer in self.outputs],
            self.finished,
            self.prompt_logprobs,
            self.metrics and self.metrics.snapshot(),
        )

    def deferred_snapshot(self) -> Callable[[], RequestOutput]:
        """Return a function that makes the copy of now, whenever it is called and in whichever thread."""
        answers = [answer.deferred_snapshot() for answer in self.outputs]
        state = self.finished, self.prompt_logprobs, self.metrics and self.metrics.snapshot()
        return lambda: RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [make() for make in answers],
            *state,
        )


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one text.

    Attributes:
        embedding: numbers, as many as the model has dimensions.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
