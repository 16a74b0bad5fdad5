"""Fields of a request without effect, or with a contradiction to another field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from opgraft.errors import HTTPError
from opgraft.serving.server.protocol import ChatRequest, GenerationFields, TokenizeRequest

_Rule: TypeAlias = tuple[str, Callable[[Any], bool], str]
"""A field, a test for a request with a useless field, and the advice."""


_GENERATION: Sequence[_Rule] = (
    (
        "response_format.json_schema",
        lambda body: (
            body.response_format is not None
            and body.response_format.type != "json_schema"
            and body.response_format.json_schema is not None
        ),
        "needs the type json_schema",
    ),
    (
        "prompt_logprobs",
        lambda body: body.prompt_logprobs is not None and bool(body.stream),
        "is in whole answers only: leave stream out",
    ),
    (
        "max_tokens",
        lambda body: body.max_tokens not in (None, body.max_completion_tokens or body.max_tokens),
        "is the older name of max_completion_tokens, and they differ: give one of them",
    ),
    (
        "n_predict",
        lambda body: (
            body.n_predict
            not in (None, -1, body.max_completion_tokens or body.max_tokens or body.n_predict)
        ),
        "is another name of max_tokens, and they differ: give one of them",
    ),
)


def _lacks_functions(body: ChatRequest) -> bool:
    if body.functions or body.function_call in (None, "auto"):
        return False
    # Without any function, "none" is the default.
    return body.function_call != "none" or bool(body.tools)


def _needs_messages(field: str, counts: Callable[[Any], bool] = bool) -> _Rule:
    """Return the rule for a field of chats.

    Args:
        field: the name.
        counts: tells whether a value of the field has a meaning.
    """
    return (
        field,
        lambda body: counts(getattr(body, field)) and body.messages is None,
        "needs messages",
    )


def _is_given(value: object) -> bool:
    return value is not None


_CONTINUATION: _Rule = (
    "continue_final_message",
    lambda body: bool(body.continue_final_message and body.add_generation_prompt),
    "goes on with the last message, and add_generation_prompt begins another: leave one out",
)
_CHAT: Sequence[_Rule] = (
    _CONTINUATION,
    (
        "functions",
        lambda body: bool(body.functions) and bool(body.tools),
        "is the older name of tools: leave one of the two out",
    ),
    (
        "tool_choice",
        lambda body: bool(body.functions) and body.tool_choice not in (None, "auto"),
        "needs tools: use function_call beside functions",
    ),
    (
        "function_call",
        _lacks_functions,
        "needs functions: use tools with tool_choice",
    ),
    (
        "top_logprobs",
        lambda body: bool(body.top_logprobs) and not body.logprobs,
        "needs logprobs: true",
    ),
)
_TOKENIZE: Sequence[_Rule] = (
    *map(_needs_messages, ("tools", "chat_template_kwargs", "continue_final_message")),
    *(_needs_messages(field, _is_given) for field in ("add_generation_prompt", "chat_template")),
    _CONTINUATION,
)


def expect_no_contradiction(body: GenerationFields | TokenizeRequest) -> None:
    """Check that no field would be ignored.

    Raises:
        HTTPError: about the first such field.
    """
    rules = list(_TOKENIZE if isinstance(body, TokenizeRequest) else _GENERATION)
    if isinstance(body, ChatRequest):
        rules += _CHAT
    for field, is_useless, advice in rules:
        if is_useless(body):
            raise HTTPError(400, f"{field} {advice}", field=field, code="invalid_value")
