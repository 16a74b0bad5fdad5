"""A request: one prompt that becomes one sequence of tokens, and the conditions that end it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import RequestError

Status = Literal["waiting", "running", "finished"]
FinishReason = Literal["stop", "length", "abort", "error"]


class Request:
    """One sequence on its way through the engine.

    Attributes:
        request_id: unique among the requests that the engine holds.
        prompt, output: token ids; the output grows.
        params: how it is sampled; ``n`` is for ``split``, a request is always one sequence.
        eos: tokens that end it unless ``params.ignore_eos``.
        ends: all tokens that end it.
        num_least: tokens of prompt and output before which nothing ends it.
        num_most: tokens of prompt and output that it has at most, as far as ``params`` say.
        priority: under the policy "priority" lower ones come first.
        cache_salt: requests with different salts never share blocks of the cache, such as those of
            two tenants.
        bad_words: ``params.bad_words`` as tokens.
        grammar: compiled from ``params.structured_output``.
        parent: the request whose prompt's blocks this one shares, for ``n > 1``.
        context: length of the context that its first tokens are rotated for, by ropes that depend
            on it: its prompt's, or the length that it had when it was rotated anew; see
            ``Scheduler``.
        rotation: names the ways in which ropes rotate its keys; sequences share blocks only where
            these are the same.
        arrival: its number in the order of arrival; the scheduler gives one where it is below zero,
            and to replicas of an engine requests come with one.
        rank: its place in the scheduler's order.
        admitted: when it was scheduled first, in seconds of ``time.monotonic()``; ``None`` before.
        num_tokens: tokens of prompt and output.
        num_admitted: tokens that it had when it was last admitted.
        num_computed: tokens whose keys and values are in the cache.
        num_cached: tokens that were found there when it was last admitted.
        num_preemptions: how often it gave its blocks to others.
        computing: the step that computes some of its tokens now, as the scheduler keeps it;
            ``None`` if none does.
        block_hashes: those of its full blocks so far, which the cache manager keeps.

    Raises:
        RequestError: the prompt is empty, or an id, a priority or a salt is of the wrong type.
    """

    __slots__ = (
        "admitted",
        "arrival",
        "bad_words",
        "block_hashes",
        "cache_salt",
        "computing",
        "context",
        "ends",
        "eos",
        "finish_reason",
        "grammar",
        "num_admitted",
        "num_cached",
        "num_computed",
        "num_least",
        "num_most",
        "num_preemptions",
        "num_tokens",
        "output",
        "params",
        "parent",
        "priority",
        "prompt",
        "rank",
        "request_id",
        "rotation",
        "status",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos: Iterable[int] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        bad_words: Iterable[Sequence[int]] = (),
        grammar: Any = None,
        parent: str | None = None,
    ) -> None:
        _expect_type("request_id", request_id, str, "a text")
        _expect_type("priority", priority, int, "an integer, the lowest for what comes first")
        _expect_type("cache_salt", cache_salt, str | None, "a text, or None")
        if not prompt:
            raise RequestError(
                f"request {request_id!r} has an empty prompt: give it at least one token"
            )
        self.request_id = request_id
        self.prompt = list(prompt)
        self.output: list[int] = []
        self.params = params
        self.eos = frozenset(eos)
        self.ends = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self.eos
        )
        self.priority = priority
        self.cache_salt = cache_salt
        self.bad_words = tuple(map(tuple, bad_words))
        self.grammar = grammar
        self.parent = parent
        self.context = len(self.prompt)
        self.rotation: tuple[int, ...] = ()
        self.arrival = -1
        self.rank = (0, 0)
        self.admitted: float | None = None
        self.status: Status = "waiting"
        self.finish_reason: FinishReason | None = None
        self.num_tokens = len(self.prompt)
        self.num_least = self.num_tokens + params.min_tokens
        self.num_most = self.num_tokens + params.most_tokens
        self.num_admitted = 0
        self.num_computed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.computing: Any = None
        self.block_hashes: list[bytes] = []

    def tokens(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the tokens of prompt and output from position ``start`` to before ``stop``."""
        stop = self.num_tokens if stop is None else stop
        prompt = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - prompt, 0) : max(stop - prompt, 0)]

    def split(self) -> list[Request]:
        """Return a request of its own for each of ``params.n``: the others share the first's prompt.

        With a seed, each has another one. The first alone gives log-probabilities of the prompt.
        """
        if self.params.n == 1:
            return [self]
        return [self._sample(index) for index in range(self.params.n)]

    def _sample(self, index: int) -> Request:
        seed = None if self.params.seed is None else self.params.seed + index
        prompt_logprobs = None if index else self.params.prompt_logprobs
        sample = Request(
            f"{self.request_id}/{index}",
            self.prompt,
            dataclasses.replace(self.params, n=1, seed=seed, prompt_logprobs=prompt_logprobs),
            eos=self.eos,
            priority=self.priority,
            cache_salt=self.cache_salt,
            bad_words=self.bad_words,
            grammar=self.grammar,
            parent=f"{self.request_id}/0" if index else None,
        )
        sample.prompt = self.prompt  # one list for all, which nobody changes
        return sample

    def drop_output(self, num_tokens: int) -> None:
        """Drop the tokens of the output from position ``num_tokens`` of the sequence."""
        del self.output[num_tokens - len(self.prompt) :]

    def start_anew(self) -> None:
        """Wait with the tokens that there are, nothing of them computed, whatever was being done with it."""
        self.status, self.finish_reason, self.computing = "waiting", None, None
        self.num_tokens, self.num_computed = len(self.prompt) + len(self.output), 0
        self.block_hashes = []

    def append(self, token: int, max_model_len: int) -> bool:
        """Add a sampled token to the output, and tell whether that ends it; ``finish_reason`` says why."""
        self.output.append(token)
        self.num_tokens += 1
        if token in self.ends and self.num_tokens > self.num_least:
            self.finish_reason = "stop"
        elif self.num_tokens >= self.num_most or self.num_tokens >= max_model_len:
            self.finish_reason = "length"
        return self.finish_reason is not None


def _expect_type(field: str, value: object, kind: Any, expected: str) -> None:
    """Refuse a value of another type: the scheduler would fail by it with all requests that it holds."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{field} is {value!r:.80}: give {expected}", field)
