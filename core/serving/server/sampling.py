"""The sampling of a request, within the limits of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import HTTPError
from opgraft.serving.server.forms import AnswerForm
from opgraft.serving.server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
)
from opgraft.serving.server.service import Service

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
"""Fields with the same name in ``SamplingParams``."""

_COMPLETION_TOKENS = 16
"""Tokens of a completion by default, and of a chat beside the longest prompt.

A chat's answer may fill the context otherwise.
"""

_ENDLESS = -1
"""The default of llama.cpp's ``n_predict``."""

_STOP_CHARACTERS = 256
"""Most characters of a text to stop at, or of a bad word."""


def expect_answers(body: GenerationFields, prompts: int, service: Service) -> None:
    """Check the number of answers, before any work for them.

    Raises:
        HTTPError: the request wants too many.
    """
    limit = service.settings.max_answers
    answers = prompts * (body.n or 1)
    if answers > limit:
        field = "prompt" if prompts > limit else "n"
        raise _too_many("answers (prompts times n)", answers, limit, field)


def expect_prompts(
    body: GenerationFields, prompts: Sequence[Sequence[int]], service: Service
) -> None:
    """Check the length of the prompts.

    Raises:
        HTTPError: a prompt is too long.
    """
    limit = service.settings.max_prompt_tokens
    longest = max(map(len, prompts), default=0)
    if limit is not None and longest > limit:
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        raise _too_many("tokens of a prompt", longest, limit, field)


def kept_tokens(body: GenerationFields, service: Service) -> int | None:
    """Return the most tokens of a prompt, counted from its end, or None to keep all.

    The number -1 stands for the longest prompt that leaves room for the answer.

    Raises:
        HTTPError: the number is another one below 1.
    """
    wanted = body.truncate_prompt_tokens
    if wanted == -1:
        _, asked = _asked_tokens(body)
        answer = _COMPLETION_TOKENS if asked is None else max(1, asked)
        return max(1, service.max_model_len - answer)
    return expect_kept(wanted)


def expect_kept(wanted: int | None) -> int | None:
    """Return the most tokens of a prompt or text.

    Raises:
        HTTPError: the number is below 1.
    """
    if wanted is not None and wanted < 1:
        field = "truncate_prompt_tokens"
        message = f"{field} is {wanted}: use 1 or more, or -1 for the longest prompt"
        raise HTTPError(400, message, field=field, code="invalid_value")
    return wanted


def scores_only(body: GenerationFields) -> bool:
    """Return True if the request wants only the prompt with its log-probabilities."""
    if not isinstance(body, CompletionRequest):
        return False
    _, asked = _asked_tokens(body)
    return asked == 0 and bool(body.echo)


def params_of(
    body: GenerationFields,
    prompts: Sequence[Sequence[int]],
    service: Service,
    form: AnswerForm | None,
    settled: Mapping[str, Any],
) -> SamplingParams:
    """Return the sampling settings of a request.

    Args:
        body: the request.
        prompts: the token ids of the prompts.
        service: has the limits.
        form: the form of the answer, from ``form_of``.
        settled: settings in place of the request's.

    Raises:
        HTTPError: the request wants more than the server allows, or an unknown token.
        RequestError: a value is not allowed, or two values contradict each other.
    """
    for field in ("stop", "stop_token_ids", "bad_words"):
        _expect_few(getattr(body, field) or (), service.settings.max_stops, field)
    _expect_few(list(body.logit_bias or ()), service.settings.max_logit_bias, "logit_bias")
    _expect_few(body.allowed_token_ids or (), service.vocab_size, "allowed_token_ids")
    given = {
        **service.llm.engine.inputs.sampling_defaults,
        **body.model_dump(include=set(_AS_THEY_ARE), exclude_none=True),
    }
    # Some clients draw seeds from all whole numbers.
    if body.seed is not None and body.seed < 0:
        given["seed"] = body.seed % (1 << 64)
    given |= {
        "max_tokens": _max_tokens(body, prompts, service),
        "logit_bias": _logit_bias(body.logit_bias or {}, service.vocab_size),
        "structured_output": None if form is None else form.spec,
        **_logprobs(body, service.settings.max_logprobs),
        **settled,
    }
    return SamplingParams(**given)


def certain_tokens(body: GenerationFields, params: SamplingParams) -> int:
    """Return the least number of tokens of an answer."""
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
    """Check the number of log-probabilities. They take memory and time from other requests.

    Args:
        params: of the request.
        prompt_tokens: of all prompts of the request.
        answer_tokens: of all answers so far, or the least number.
        service: has the limit.

    Raises:
        HTTPError: there are too many.
    """
    limit = service.settings.max_total_logprobs
    total = 0
    if params.logprobs is not None:
        total += answer_tokens * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        # Each answer has the echo of its prompt.
        total += prompt_tokens * params.n * (params.prompt_logprobs + 1)
    if total > limit:
        field = "prompt_logprobs" if params.logprobs is None else "logprobs"
        raise _too_many("log-probabilities in all", total, limit, field)


def _expect_few(listed: str | Sequence[object], limit: int, field: str) -> None:
    """Check that lists and texts are short. A search for long ones would hold up other requests."""
    if not isinstance(listed, str) and len(listed) > limit:
        raise _too_many(f"entries of {field}", len(listed), limit, field)
    entries = [listed] if isinstance(listed, str) else listed
    texts = [each for each in entries if isinstance(each, str)]
    # Token ids have no length.
    longest = max(map(len, texts), default=0)
    if longest > _STOP_CHARACTERS:
        raise _too_many(f"characters of an entry of {field}", longest, _STOP_CHARACTERS, field)


def wanted_tokens(body: GenerationFields) -> int:
    """Return the number of tokens that a request asks for, 1 by default."""
    return _asked_tokens(body)[1] or 1


def _asked_tokens(body: GenerationFields) -> tuple[str, int | None]:
    """Return the field with the most tokens of an answer, and the number, None by default."""
    if body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    if body.max_tokens is None and body.n_predict not in (None, _ENDLESS):
        return "n_predict", body.n_predict
    return "max_tokens", body.max_tokens


def _max_tokens(body: GenerationFields, prompts: Sequence[Sequence[int]], service: Service) -> int:
    field, wanted = _asked_tokens(body)
    longest = max(map(len, prompts))
    room = service.llm.engine.core.max_model_len - longest
    answers = len(prompts) * (body.n or 1)
    limit = service.settings.max_output_tokens
    if scores_only(body):
        # The engine needs a token, and the answer leaves the token out.
        wanted = 1
    if wanted is None:
        if limit is not None and answers > limit:
            raise _too_many("tokens (one for each answer, at least)", answers, limit, "n")
        usual: int = _COMPLETION_TOKENS if isinstance(body, CompletionRequest) else room
        usual = service.llm.engine.inputs.sampling_defaults.get("max_tokens", usual)
        share = usual if limit is None else limit // answers
        return max(1, min(usual, room, share))
    if wanted > room:
        raise HTTPError(
            400,
            f"{field} is {wanted} after a prompt of {longest} tokens, and this model's maximum "
            f"context length is {room + longest} tokens: ask for at most {room}, or shorten the "
            "prompt",
            field=field,
            code="context_length_exceeded",
        )
    total = wanted * answers
    if limit is not None and total > limit:
        raise _too_many(f"tokens ({field} for each of {answers} answers)", total, limit, field)
    return wanted


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for token, value in given.items():
        is_number = token.isascii() and token.isdigit()
        # Ten digits are enough, and Python takes long to read thousands.
        if not is_number or int(token[:10]) >= vocab_size:
            last = vocab_size - 1
            message = (
                f"logit_bias has the key {token[:20]!r}, which is no token id: use 0 to {last}"
            )
            raise HTTPError(400, message, field="logit_bias", code="invalid_value")
        bias[int(token)] = value
    return bias


def _logprobs(body: GenerationFields, limit: int) -> dict[str, Any]:
    """Return the number of log-probabilities for each token of the answer, and of the prompt."""
    of_answer: int | None = None
    echoed: int | None = None
    field = "logprobs"
    if isinstance(body, CompletionRequest):
        of_answer = body.logprobs
        echoed = of_answer if body.echo else None
    elif isinstance(body, ChatRequest) and body.logprobs:
        field = "top_logprobs"
        of_answer = body.top_logprobs or 0
    for name, wanted in ((field, of_answer), ("prompt_logprobs", body.prompt_logprobs)):
        if wanted is not None and wanted < 0:
            message = f"{name} is {wanted}: use 0 to {limit}"
            raise HTTPError(400, message, field=name, code="invalid_value")
        if wanted is not None and wanted > limit:
            raise _too_many("log-probabilities of a token", wanted, limit, name)
    wanted_of_prompt = [each for each in (echoed, body.prompt_logprobs) if each is not None]
    return {"logprobs": of_answer, "prompt_logprobs": max(wanted_of_prompt, default=None)}


def _too_many(what: str, found: int, limit: int, field: str) -> HTTPError:
    message = f"the request asks for {found} {what}, and this server allows {limit}"
    return HTTPError(400, message, field=field, code="limit_exceeded")
