"""Sampling as requests ask for it, within the limits of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import HTTPError
from opgraft.serving.server.forms import Form
from opgraft.serving.server.protocol import (
    ChatRequest,
    CompletionRequest,
    Generation,
)
from opgraft.serving.server.service import Service

# Fmt: skip.
_AS_THEY_ARE = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
"""Fields that ``SamplingParams`` has by the same names."""

_COMPLETION_TOKENS = 16
"""Tokens of a completion that does not say how many it wants; a chat's answer may fill the context."""

_STOP_CHARACTERS = 256
"""Characters of a text to stop at, at most, or of a bad word."""


def expect_answers(body: Generation, prompts: int, service: Service) -> None:
    """Refuse more answers than the server gives, before there is work for them.

    Raises:
        HTTPError: with the limit.
    """
    limit, answers = service.settings.max_answers, prompts * (body.n or 1)
    if answers > limit:
        raise _too_many(
            "answers (prompts times n)", answers, limit, "prompt" if prompts > limit else "n"
        )


def expect_prompts(body: Generation, prompts: Sequence[Sequence[int]], service: Service) -> None:
    """Refuse longer prompts than the server takes.

    Raises:
        HTTPError: with the limit.
    """
    limit, longest = service.settings.max_prompt_tokens, max(map(len, prompts), default=0)
    if limit is not None and longest > limit:
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        raise _too_many("tokens of a prompt", longest, limit, field)


def scores_only(body: Generation) -> bool:
    """Tell whether no token is asked for, but the prompt again with its log-probabilities."""
    return isinstance(body, CompletionRequest) and body.max_tokens == 0 and bool(body.echo)


def params_of(
    body: Generation,
    prompts: Sequence[Sequence[int]],
    service: Service,
    form: Form | None,
    settled: Mapping[str, Any],
) -> SamplingParams:
    """Return the sampling settings of a request.

    Args:
        body: the request.
        prompts: the token ids of its prompts.
        service: has the limits.
        form: the form of the answer, from ``form_of``.
        settled: settings in place of those of the request.

    Raises:
        HTTPError: it asks for more than the server allows, or for what it has not.
        RequestError: a value is not allowed, or two contradict each other.
    """
    for field in ("stop", "stop_token_ids", "bad_words"):
        _expect_few(getattr(body, field) or (), service.settings.max_stops, field)
    _expect_few(list(body.logit_bias or ()), service.settings.max_logit_bias, "logit_bias")
    _expect_few(body.allowed_token_ids or (), service.vocab_size, "allowed_token_ids")
    given = body.model_dump(include=set(_AS_THEY_ARE), exclude_none=True)
    if body.seed is not None and body.seed < 0:
        given["seed"] = body.seed % (1 << 64)  # of clients that draw from all whole numbers
    given |= {
        "max_tokens": _max_tokens(body, prompts, service),
        "logit_bias": _logit_bias(body.logit_bias or {}, service.vocab_size),
        "structured_output": None if form is None else form.spec,
        **_logprobs(body, service.settings.max_logprobs),
        **settled,
    }
    return SamplingParams(**given)


def certain_tokens(body: Generation, params: SamplingParams) -> int:
    """Return the tokens that an answer has in any case."""
    if scores_only(body):
        return 0
    may_end = params.stop or params.stop_token_ids or params.structured_output is not None
    if params.ignore_eos and not may_end:
        return params.most_tokens
    # The end of a sequence is a token, too.
    return max(1, params.min_tokens)


def expect_few_logprobs(
    params: SamplingParams, prompt_tokens: int, answer_tokens: int, service: Service
) -> None:
    """Refuse too many log-probabilities: to write them would take memory and time from others.

    Args:
        params: of the request.
        prompt_tokens: of all prompts of the request.
        answer_tokens: of all answers so far, or that they have in any case.
        service: has the limit.

    Raises:
        HTTPError: with the limit.
    """
    if params.logprobs is None:
        return
    limit = service.settings.max_total_logprobs
    # Each answer has the echo of its prompt.
    echoed = 0 if params.prompt_logprobs is None else prompt_tokens * params.n
    total = (echoed + answer_tokens) * (params.logprobs + 1)
    if total > limit:
        raise _too_many("log-probabilities in all", total, limit, "logprobs")


def _expect_few(listed: str | Sequence[object], limit: int, field: str) -> None:
    """Refuse lists and texts so long that to look for them would keep other requests waiting."""
    if not isinstance(listed, str) and len(listed) > limit:
        raise _too_many(f"entries of {field}", len(listed), limit, field)
    texts = (
        [listed] if isinstance(listed, str) else [each for each in listed if isinstance(each, str)]
    )
    longest = max(map(len, texts), default=0)
    if longest > _STOP_CHARACTERS:
        raise _too_many(f"characters of an entry of {field}", longest, _STOP_CHARACTERS, field)


def _max_tokens(body: Generation, prompts: Sequence[Sequence[int]], service: Service) -> int:
    field, wanted = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        field, wanted = "max_completion_tokens", body.max_completion_tokens
    longest = max(map(len, prompts))
    room = service.llm.engine.core.max_model_len - longest
    answers = len(prompts) * (body.n or 1)
    limit = service.settings.max_output_tokens
    if scores_only(body):
        wanted = 1  # which the engine needs, and the answer leaves out
    if wanted is None:
        if limit is not None and answers > limit:
            raise _too_many("tokens (one for each answer, at least)", answers, limit, "n")
        usual = _COMPLETION_TOKENS if isinstance(body, CompletionRequest) else room
        return max(1, min(usual, room, usual if limit is None else limit // answers))
    if wanted > room:
        raise HTTPError(
            400,
            f"{field} is {wanted} after a prompt of {longest} tokens, and the model's maximum "
            f"context length is {room + longest} tokens: ask for at most {room}, or shorten the "
            "prompt",
            field=field,
            code="context_length_exceeded",
        )
    if limit is not None and wanted * answers > limit:
        raise _too_many(
            f"tokens ({field} for each of {answers} answers)", wanted * answers, limit, field
        )
    return wanted


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for token, value in given.items():
        if not (token.isascii() and token.isdigit() and int(token[:10]) < vocab_size):
            raise HTTPError(
                400,
                f"logit_bias has the key {token[:20]!r}, which is no token id: use 0 to {vocab_size - 1}",
                field="logit_bias",
                code="invalid_value",
            )
        bias[int(token)] = value
    return bias


def _logprobs(body: Generation, limit: int) -> dict[str, Any]:
    """Return how many log-probabilities are wanted of each token of the answer, and of the prompt if that is echoed."""
    if isinstance(body, CompletionRequest):
        field, wanted = "logprobs", body.logprobs
    elif isinstance(body, ChatRequest) and body.logprobs:
        field, wanted = "top_logprobs", body.top_logprobs or 0
    else:
        return {}
    if wanted is not None and wanted < 0:
        raise HTTPError(
            400, f"{field} is {wanted}: use 0 to {limit}", field=field, code="invalid_value"
        )
    if wanted is not None and wanted > limit:
        raise _too_many("log-probabilities of a token", wanted, limit, field)
    echoed = isinstance(body, CompletionRequest) and body.echo
    return {"logprobs": wanted, "prompt_logprobs": wanted if echoed else None}


def _too_many(what: str, found: int, limit: int, field: str) -> HTTPError:
    return HTTPError(
        400,
        f"the request asks for {found} {what}, and this server allows {limit}",
        field=field,
        code="limit_exceeded",
    )
