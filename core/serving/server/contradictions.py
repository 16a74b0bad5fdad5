"""Fields of a request that go without effect beside others, or contradict them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from opgraft.errors import HTTPError
from opgraft.serving.server.protocol import ChatRequest, Generation, TokenizeRequest

_Rule: TypeAlias = tuple[str, Callable[[Any], bool], str]
"""A field, whether it stands where it means nothing, and what to do about it."""


def _has_form(body: Generation) -> bool:
    return body.response_format is not None and body.response_format.type != "text"


_GENERATION: Sequence[_Rule] = (
    (
        "stream_options",
        lambda body: body.stream_options is not None and not body.stream,
        "needs stream: true",
    ),
    (
        "response_format.json_schema",
        lambda body: (
            body.response_format is not None
            and body.response_format.type != "json_schema"
            and body.response_format.json_schema is not None
        ),
        "needs the type json_schema",
    ),
)
_CHAT: Sequence[_Rule] = (
    (
        "max_tokens",
        lambda body: body.max_tokens is not None and body.max_completion_tokens is not None,
        "is the older name of max_completion_tokens: give one of them",
    ),
    (
        "top_logprobs",
        lambda body: bool(body.top_logprobs) and not body.logprobs,
        "needs logprobs: true",
    ),
    (
        "tool_choice",
        lambda body: body.tool_choice not in (None, "none") and not body.tools,
        "needs tools",
    ),
    (
        "parallel_tool_calls",
        lambda body: body.parallel_tool_calls is not None and not body.tools,
        "needs tools",
    ),
    (
        "response_format",
        lambda body: _has_form(body) and bool(body.tools) and body.tool_choice != "none",
        "holds the whole answer to a form, so that no tool could be called: leave one of them out, or choose no tool "
        "by tool_choice: none",
    ),
)
_TOKENIZE: Sequence[_Rule] = (
    ("tools", lambda body: bool(body.tools) and body.messages is None, "needs messages"),
    (
        "add_generation_prompt",
        lambda body: body.add_generation_prompt is not None and body.messages is None,
        "needs messages",
    ),
    (
        "chat_template_kwargs",
        lambda body: bool(body.chat_template_kwargs) and body.messages is None,
        "needs messages",
    ),
)


def expect_no_contradiction(body: Generation | TokenizeRequest) -> None:
    """Refuse fields that would be ignored.

    Raises:
        HTTPError: with the first of them.
    """
    rules = _TOKENIZE if isinstance(body, TokenizeRequest) else _GENERATION
    for field, stands, advice in (*rules, *(_CHAT if isinstance(body, ChatRequest) else ())):
        if stands(body):
            raise HTTPError(400, f"{field} {advice}", field=field, code="invalid_value")
