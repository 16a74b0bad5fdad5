"""Chats in the form for templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from opgraft.errors import HTTPError
from opgraft.serving.server.protocol import (
    AssistantMessage,
    ChatMessage,
    RefusalPart,
    TextPart,
    ToolCall,
)

_OWN_FIELDS = ("messages", "tools", "add_generation_prompt")

_TEMPLATE_FIELDS = {"role", "name", "tool_call_id"}
_ROLES = {"developer": "system", "function": "tool"}

THINKING_BUDGET = "thinking_budget"
"""The name of the most tokens of reasoning in templates, such as that of Seed-OSS."""

_INVALID = "invalid_json"
"""The name for arguments that are no JSON object."""


def template_values(given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return further values for a template.

    Raises:
        HTTPError: a value has a field of the request.
    """
    for name in _OWN_FIELDS:
        if name in (given or ()):
            field = f"chat_template_kwargs.{name}"
            message = f"{field} cannot be given there: leave it out"
            raise HTTPError(400, message, field=field, code="invalid_value")
    return given


def expect_allowed(template: str | None, allowed: bool) -> None:
    """Check that the operator allows the chat template of a request.

    Args:
        template: of the request, if the request has one.
        allowed: True if the operator allows templates in requests.

    Raises:
        HTTPError: the operator does not allow them.
    """
    if template is None or allowed:
        return
    message = (
        "chat_template has a value that is not supported: the operator of the server chooses "
        "the template, unless server.request_templates allows others"
    )
    raise HTTPError(400, message, field="chat_template", code="unsupported_value")


def for_template(
    messages: Sequence[ChatMessage], instruction: str | None = None
) -> list[dict[str, Any]]:
    """Return messages for templates: the content as a text, and arguments of calls as objects.

    Args:
        messages: of a request.
        instruction: stands before the first text, for a template without a place for tools. Calls
            are texts then, too.
    """
    plain = [_as_plain_message(message) for message in messages]
    if instruction is None or not plain:
        return plain
    # Some templates refuse a system message, so the instruction stands in the first message.
    first, *others = map(_with_calls_as_text, plain)
    return [{**first, "content": f"{instruction}\n\n{first['content']}"}, *others]


def _with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    content = "\n".join(filter(None, [message["content"], *calls]))
    return {**message, "content": content}


def _as_plain_message(message: ChatMessage) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True, include=_TEMPLATE_FIELDS)
    # Templates know the older name of one role, and the newer one of the other.
    plain["role"] = _ROLES.get(message.role, message.role)
    plain["content"] = _text_of(message.content)
    if isinstance(message, AssistantMessage):
        plain["content"] = plain["content"] or message.refusal or ""
        reasoning = message.reasoning_content or message.reasoning
        calls = [_as_plain_call(call) for call in _calls_of(message)]
        if reasoning:
            plain["reasoning_content"] = reasoning
        if calls:
            plain["tool_calls"] = calls
    return plain


def _text_of(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _calls_of(message: AssistantMessage) -> Sequence[ToolCall]:
    if message.tool_calls or message.function_call is None:
        return message.tool_calls or ()
    return (ToolCall(function=message.function_call),)


def _as_plain_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": arguments_of(call.function.arguments)}
    plain = {"type": call.type, "function": function}
    return plain if call.id is None else {"id": call.id, **plain}


def arguments_of(given: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the arguments of a call as an object, because templates loop over them.

    Other text of a model becomes a value, so that the chat can go on.
    """
    if not given or not isinstance(given, str):
        return given or {}
    try:
        value = json.loads(given)
        # JSON of Python has NaN, infinity and halves of surrogate pairs. Other JSON has none.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_INVALID: given}
