"""Chats as templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from opgraft.errors import HTTPError
from opgraft.serving.server.protocol import ChatMessage

_OWN_FIELDS = ("messages", "tools", "add_generation_prompt")


def template_values(given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return what else a template is to know.

    Raises:
        HTTPError: it has what fields of the request are for.
    """
    for name in _OWN_FIELDS:
        if name in (given or ()):
            field = f"chat_template_kwargs.{name}"
            raise HTTPError(
                400,
                f"{field} cannot be given there: leave it out",
                field=field,
                code="invalid_value",
            )
    return given


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as templates know them: a text as content, and the arguments of calls as objects.

    Raises:
        HTTPError: the arguments of a call are no JSON object.
    """
    return [
        _as_plain_message(message, f"messages[{place}]") for place, message in enumerate(messages)
    ]


def _as_plain_message(message: ChatMessage, place: str) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True)
    if message.role == "developer":
        plain["role"] = "system"  # its older name, which templates know
    if isinstance(message.content, list):
        plain["content"] = "\n".join(part.text for part in message.content)
    for number, call in enumerate(plain.get("tool_calls", ())):
        field = f"{place}.tool_calls[{number}].function.arguments"
        call["function"]["arguments"] = _arguments(call["function"]["arguments"], field)
    if "tool_calls" in plain:
        plain.setdefault("content", "")
    return plain


def _arguments(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise HTTPError(400, f"{field} is no JSON object", field=field, code="invalid_value")
    return value
