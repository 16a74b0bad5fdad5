"""A request: one prompt that becomes one sequence of tokens, and the conditions of its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from opgraft.engine.lora.request import NO_LORA, LoRARequest
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import RequestError

Status = Literal["waiting", "running", "finished"]
FinishReason = Literal["stop", "length", "abort", "error"]


class Request:
    """One sequence on its way through the engine.

    Attributes:
        request_id: unique among the requests that the engine holds.
        prompt, output: token ids; the output grows.
        params: settings of sampling; ``n`` is for ``split``, a request is always one sequence.
        eos: tokens that end the request unless ``params.ignore_eos``.
        ends: all tokens that end the request.
        num_least: tokens of prompt and output before the request may end.
        num_most: tokens of prompt and output at most, as far as ``params`` say.
        priority: under the policy "priority" lower numbers come first.
        cache_salt: requests with different salts, such as two tenants, never share blocks of the
            cache.
        bad_words: ``params.bad_words`` as tokens.
        lora: the adapter; ``None`` for the base model alone.
        lora_digest: of the adapter's files. Sequences share blocks only if these agree. The engine
            writes this.
        grammar: compiled from ``params.structured_output``.
        parent: for ``n > 1``, the id of the request that computes the shared prompt.
        context: for ropes that depend on the length of the context: the length that the first
            tokens are rotated for. At first the length of the prompt; see ``Scheduler``.
        rotation: names the rotations of the keys. Sequences share blocks only if these names agree.
        arrival: number in the order of arrival. If below zero, the scheduler gives a number;
            replicas of an engine receive requests with numbers.
        rank: place in the scheduler's order.
        admitted: moment of the first admission, in seconds of ``time.monotonic()``; before,
            ``None``.
        num_tokens: tokens of prompt and output.
        num_tokens_at_admission: tokens of prompt and output at the last admission.
        num_computed: tokens with keys and values in the cache.
        num_cached: tokens that the last admission found in the cache.
        num_preemptions: number of times that the request gave its blocks to others.
        computing: the scheduler's record of the step that computes tokens of the request now, or
            ``None``.
        block_hashes: hashes of the full blocks so far, kept by the cache manager.
        was_sought: True once the beginning was looked up outside of the cache.

    Raises:
        RequestError: the prompt is empty, or an id, a priority, a salt or an adapter is of a wrong
            type.
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
        "lora",
        "lora_digest",
        "num_cached",
        "num_computed",
        "num_least",
        "num_most",
        "num_preemptions",
        "num_tokens",
        "num_tokens_at_admission",
        "output",
        "params",
        "parent",
        "priority",
        "prompt",
        "rank",
        "request_id",
        "rotation",
        "status",
        "was_sought",
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
        lora: LoRARequest | None = None,
        parent: str | None = None,
    ) -> None:
        _expect_type("request_id", request_id, str, "a text")
        _expect_type("priority", priority, int, "an integer, the lowest for what comes first")
        _expect_type("cache_salt", cache_salt, str | None, "a text, or None")
        _expect_type("lora_request", lora, LoRARequest | None, "a LoRARequest, or None")
        if not prompt:
            raise RequestError(
                f"request {request_id!r} has an empty prompt: give it at least one token"
            )
        self.request_id = request_id
        self.prompt = list(prompt)
        self.output: list[int] = []
        self.params = params
        self.eos = frozenset(eos)
        self.ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.ends |= self.eos
        self.priority = priority
        self.cache_salt = cache_salt
        self.bad_words = tuple(map(tuple, bad_words))
        self.grammar = grammar
        self.lora = lora
        self.lora_digest = ""
        self.parent = parent
        # The scheduler and the cache manager write everything below.
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
        self.num_tokens_at_admission = 0
        self.num_computed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.computing: Any = None
        self.block_hashes: list[bytes] = []
        self.was_sought = False

    @property
    def lora_number(self) -> int:
        """The number of the adapter; ``NO_LORA`` without one."""
        return NO_LORA if self.lora is None else self.lora.lora_int_id

    def tokens(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the tokens of prompt and output from position ``start`` to before ``stop``.

        With a prompt of 5 tokens, ``tokens(4, 7)`` is the last of the prompt and two of the output.
        """
        if stop is None:
            stop = self.num_tokens
        prompt_length = len(self.prompt)
        first_output = max(start - prompt_length, 0)
        last_output = max(stop - prompt_length, 0)
        return self.prompt[start:stop] + self.output[first_output:last_output]

    def split(self) -> list[Request]:
        """Return ``params.n`` requests with one completion each. They share the first one's prompt.

        The seeds of the requests differ. Only the first gives log-probabilities of the prompt.
        """
        if self.params.n == 1:
            return [self]
        return [self._sample(index) for index in range(self.params.n)]

    def _sample(self, index: int) -> Request:
        seed = None if self.params.seed is None else self.params.seed + index
        prompt_logprobs = None if index else self.params.prompt_logprobs
        params = dataclasses.replace(self.params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)
        sample = Request(
            f"{self.request_id}/{index}",
            self.prompt,
            params,
            eos=self.eos,
            priority=self.priority,
            cache_salt=self.cache_salt,
            bad_words=self.bad_words,
            grammar=self.grammar,
            lora=self.lora,
            parent=f"{self.request_id}/0" if index else None,
        )
        # One list for all samples: prompts are long, and nobody changes the list.
        sample.prompt = self.prompt
        return sample

    def drop_output(self, num_tokens: int) -> None:
        """Drop the output's tokens from position ``num_tokens`` of prompt and output on."""
        del self.output[num_tokens - len(self.prompt) :]

    def start_anew(self) -> None:
        """Wait again, with the same prompt and output, and none of the tokens computed."""
        self.status = "waiting"
        self.finish_reason = None
        self.computing = None
        self.num_tokens = len(self.prompt) + len(self.output)
        self.num_computed = 0
        self.block_hashes = []
        self.was_sought = False

    def append(self, token: int, max_model_len: int) -> bool:
        """Add a sampled token to the output. Return True if the token ends the request.

        ``finish_reason`` then says why: ``"stop"`` for a token of ``ends``, ``"length"`` if the
        output or the context is full.
        """
        self.output.append(token)
        self.num_tokens += 1
        if token in self.ends and self.num_tokens > self.num_least:
            self.finish_reason = "stop"
        elif self.num_tokens >= self.num_most or self.num_tokens >= max_model_len:
            self.finish_reason = "length"
        return self.finish_reason is not None


def _expect_type(field: str, value: object, kind: Any, expected: str) -> None:
    """Check the type of a field.

    In the scheduler, a value of a wrong type would make all requests fail.

    Raises:
        RequestError: the value has another type than ``kind``.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{field} is {value!r:.80}: give {expected}", field)
