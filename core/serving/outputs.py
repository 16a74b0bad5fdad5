"""Results of requests, with the names of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO


@dataclass(frozen=True, slots=True)
class Logprob:
    """One of the likeliest tokens at a place, or the sampled token.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: 1 for the likeliest.
        decoded_token: text of the token.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds of ``time.monotonic()``; None before the event.

    Attributes:
        arrival: of the request.
        admitted: first step with a part of the request.
        first_token, last_token: of the answers.
        replica: number of the engine, among several that share the requests.
        max_tokens: tokens of an answer at most, as asked for; None for as many as fit.
    """

    arrival: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    replica: int = 0
    max_tokens: int | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def time_in_queue(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.arrival

    def snapshot(self) -> RequestMetrics:
        """Return a copy that does not change."""
        return RequestMetrics(
            self.arrival,
            self.admitted,
            self.first_token,
            self.last_token,
            self.replica,
            self.max_tokens,
        )


@dataclass(slots=True)
class CompletionOutput:
    """One answer of a request.

    Attributes:
        index: among the ``n`` answers.
        text: of the answer, up to a stop string.
        token_ids: of the answer, those of a stop string included.
        cumulative_logprob: sum of the logprobs of sampled tokens, if asked for.
        logprobs: at each place, by token id, if asked for.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``; None before the end.
        stop_reason: the stop string or the stop token; None for the model's own end.
        error: a message, for the ``finish_reason`` ``error``.
        refused: True if the request asked for something impossible, such as a grammar without a
            next token.
        error_code: the kind of the error, if it has one, such as ``adapter_unusable``.
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
    error_code: str | None = None

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
            self.error_code,
        )

    def deferred_snapshot(self) -> Callable[[], CompletionOutput]:
        """Return a function for ``snapshot``."""
        return self.snapshot


class GrowingOutput(CompletionOutput):
    """An answer that grows. A token costs the same for any length of the answer.

    The text is put together when it is read, in the thread that adds to it.

    Args:
        index: among the ``n`` answers.
        written: returns the text so far; a detokenizer adds to this text.
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
        """Return a function that makes a copy of the present state later, in any thread.

        Text and lists only grow. So the present lengths are enough to cut the copy.
        """
        written = self._written()
        characters = written.tell()
        tokens = len(self.token_ids)
        logprobs = self.logprobs
        places = len(logprobs or ())
        # These are replaced, and do not grow: they are read now.
        ended = (
            self.finish_reason,
            self.stop_reason,
            self.error,
            self.refused,
            self.error_code,
        )
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
        request_id: of the request.
        prompt: None for a prompt of token ids.
        prompt_token_ids: of the prompt.
        outputs: the ``n`` answers.
        finished: True once all answers are finished.
        prompt_logprobs: at each place, if asked for; None at the first place.
        metrics: times of the request.
        num_cached_tokens: tokens of the prompt that the cache held.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0

    def snapshot(self) -> RequestOutput:
        """Return a copy that does not grow. Constant parts are shared."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [answer.snapshot() for answer in self.outputs],
            self.finished,
            self.prompt_logprobs,
            self.metrics and self.metrics.snapshot(),
            self.num_cached_tokens,
        )

    def deferred_snapshot(self) -> Callable[[], RequestOutput]:
        """Return a function that makes a copy of the present state later, in any thread."""
        answers = [answer.deferred_snapshot() for answer in self.outputs]
        metrics = self.metrics and self.metrics.snapshot()
        state = self.finished, self.prompt_logprobs, metrics, self.num_cached_tokens
        return lambda: RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [make() for make in answers],
            *state,
        )


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector, where vLLM has it: in the ``outputs`` of an embedded text.

    Attributes:
        embedding: one number for each dimension.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of dimensions."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one text.

    Attributes:
        request_id, prompt, prompt_token_ids: as of ``RequestOutput``.
        embedding: one number for each dimension.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]

    @property
    def outputs(self) -> Embedding:
        """The vector by the names of vLLM: ``outputs.embedding`` and ``outputs.hidden_size``."""
        return Embedding(self.embedding)
