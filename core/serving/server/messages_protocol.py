"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, Anthropic's interface."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from opgraft.serving.server.protocol import (
    Arguments,
    Body,
    Items,
    SamplingFields,
    Whole,
    only,
    told_apart,
)
from pydantic import BaseModel, Field, TypeAdapter

_BLOCKS = "messages[].content[]."
_CACHED = frozenset({"cache_control"})


class TextBlock(Body):
    """A text."""

    place = _BLOCKS
    without_effect = _CACHED | {"citations"}

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Reasoning of the model."""

    place = _BLOCKS
    without_effect = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Body):
    """Reasoning that only another server can read. It is left out."""

    place = _BLOCKS
    without_effect = frozenset({"data"})

    type: Literal["redacted_thinking"]


class CallBlock(Body):
    """A call by the model."""

    place = _BLOCKS
    without_effect = _CACHED | {"caller"}

    type: Literal["tool_use"]
    id: str
    name: str
    input: Arguments = None


_TEXT: TypeAdapter[Any] = TypeAdapter(str)
_TEXT_BLOCKS: TypeAdapter[Any] = TypeAdapter(Items[TextBlock])
Texts: TypeAlias = Annotated[
    str | list[TextBlock],
    told_apart(lambda given: _TEXT_BLOCKS if isinstance(given, list) else _TEXT),
]
"""A text, whole or in blocks."""


class ResultBlock(Body):
    """The result of a call."""

    place = _BLOCKS
    without_effect = _CACHED

    type: Literal["tool_result"]
    tool_use_id: str
    is_error: bool | None = None
    content: Texts | None = None


class _AnyBlock(BaseModel):
    """A block of an unknown type. The error is about the type."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]


_BLOCK_TYPES: dict[object, TypeAdapter[Any]] = {
    "text": TypeAdapter(TextBlock),
    "thinking": TypeAdapter(ThinkingBlock),
    "redacted_thinking": TypeAdapter(RedactedBlock),
    "tool_use": TypeAdapter(CallBlock),
    "tool_result": TypeAdapter(ResultBlock),
}
_ANY_BLOCK: TypeAdapter[Any] = TypeAdapter(_AnyBlock)


def _block(given: object) -> TypeAdapter[Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    return _BLOCK_TYPES.get(kind, _ANY_BLOCK) if isinstance(kind, str) else _ANY_BLOCK


ContentBlock: TypeAlias = TextBlock | ThinkingBlock | RedactedBlock | CallBlock | ResultBlock
_CONTENT: TypeAdapter[Any] = TypeAdapter(Items[Annotated[ContentBlock, told_apart(_block)]])


class InputMessage(Body):
    """A message of a user or of the model."""

    place = "messages[]."

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        str | list[ContentBlock],
        told_apart(lambda given: _CONTENT if isinstance(given, list) else _TEXT),
    ]


class MessagesTool(Body):
    """A function that the model may call."""

    place = "tools[]."
    without_effect = _CACHED | {
        *("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"),
    }

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessagesToolChoice(Body):
    """The choice of no tool, any, or the named one."""

    place = "tool_choice."

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Tells whether the model should reason, and for how many tokens."""

    place = "thinking."
    without_effect = frozenset({"display"})

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Whole | None = None


class OutputFormat(Body):
    """The form of an answer."""

    place = "output_config.format."

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form of an answer, and how much the model should reason."""

    place = "output_config."

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """The body of ``/v1/messages/count_tokens``, and a part of the body of ``/v1/messages``."""

    without_effect = _CACHED | {"speed", "user_profile_id"}

    model: str | None = None
    messages: Items[InputMessage]
    system: Texts | None = None
    tools: Items[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    container: Annotated[Any, only()] = None
    mcp_servers: Annotated[Any, only([])] = None


class MessagesRequest(CountRequest, SamplingFields):
    """The body of ``/v1/messages``."""

    without_effect = (
        SamplingFields.without_effect
        | CountRequest.without_effect
        | {"diagnostics", "inference_geo"}
    )

    max_tokens: Whole
    stop_sequences: Items[str] | None = None
