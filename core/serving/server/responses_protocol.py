"""The body of ``/v1/responses``, OpenAI's newer interface."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from opgraft.serving.server.protocol import (
    Arguments,
    Body,
    Items,
    RefusalPart,
    SamplingFields,
    StructuredOutputs,
    Texts,
    ToldObject,
    Whole,
    choice_by_form,
    only,
    told_apart,
)
from pydantic import BaseModel, Field, TypeAdapter

_ITEMS = "input[]."


class ItemPart(Body):
    """A text as a part of an item."""

    place = "input[].content[]."
    without_effect = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    text: str


_TEXT: TypeAdapter[Any] = TypeAdapter(str)
_PART: TypeAdapter[Any] = TypeAdapter(ItemPart)
_REFUSAL: TypeAdapter[Any] = TypeAdapter(RefusalPart)


def _part(given: object) -> TypeAdapter[Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    return _REFUSAL if kind == "refusal" else _PART


_Part: TypeAlias = Annotated[ItemPart | RefusalPart, told_apart(_part)]
_PARTS: TypeAdapter[Any] = TypeAdapter(Items[_Part])
ItemContent: TypeAlias = Annotated[
    str | list[ItemPart | RefusalPart],
    told_apart(lambda given: _PARTS if isinstance(given, list) else _TEXT),
]
"""The text of an item, whole or in parts."""


class MessageItem(Body):
    """A message of a user, of the operator, or of the model."""

    place = _ITEMS
    without_effect = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent


class CallItem(Body):
    """A call by the model."""

    place = _ITEMS
    without_effect = frozenset({"id", "status", "caller", "namespace"})

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments = None


class CallOutputItem(Body):
    """The result of a call."""

    place = _ITEMS
    without_effect = frozenset({"id", "status", "caller", "namespace", "name"})

    type: Literal["function_call_output"]
    call_id: str
    output: ItemContent


class ReasoningItem(Body):
    """Reasoning of the model."""

    place = _ITEMS
    without_effect = frozenset({"id", "status", "encrypted_content"})

    type: Literal["reasoning"]
    summary: Items[ItemPart] | None = None
    content: Items[ItemPart] | None = None


class _AnyItem(BaseModel):
    """An item of an unknown type. The error is about the type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"]


_ITEM_TYPES: dict[object, TypeAdapter[Any]] = {
    None: TypeAdapter(MessageItem),
    "message": TypeAdapter(MessageItem),
    "function_call": TypeAdapter(CallItem),
    "function_call_output": TypeAdapter(CallOutputItem),
    "reasoning": TypeAdapter(ReasoningItem),
}
_ANY_ITEM: TypeAdapter[Any] = TypeAdapter(_AnyItem)


def _item(given: object) -> TypeAdapter[Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    known = kind is None or isinstance(kind, str)
    return _ITEM_TYPES.get(kind, _ANY_ITEM) if known else _ANY_ITEM


Item: TypeAlias = Annotated[
    MessageItem | CallItem | CallOutputItem | ReasoningItem, told_apart(_item)
]
"""A part of a conversation."""

_LIST: TypeAdapter[Any] = TypeAdapter(Items[Item])
Input: TypeAlias = Annotated[
    str | list[MessageItem | CallItem | CallOutputItem | ReasoningItem],
    told_apart(lambda given: _LIST if isinstance(given, list) else _TEXT),
]
"""The new part of a conversation: the text of a user, or items."""


class FunctionTool(Body):
    """A function that the model may call."""

    place = "tools[]."

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: ToldObject | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """The choice of one function."""

    place = "tool_choice."

    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    """The choice among some of the functions."""

    place = "tool_choice."

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[FunctionChoice]


_ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions,
    choice_by_form(FunctionChoice, AllowedFunctions),
]


class TextFormat(Body):
    """The form of the text of an answer."""

    place = "text.format."

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: ToldObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    """The form of the text of an answer, within ``format``."""

    place = "text."
    without_effect = frozenset({"verbosity"})

    format: TextFormat | None = None


class ReasoningSettings(Body):
    """Settings of the reasoning of the model."""

    place = "reasoning."
    without_effect = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: str | None = None


class ResponsesRequest(SamplingFields):
    """The body of ``/v1/responses``."""

    without_effect = SamplingFields.without_effect | {"max_tool_calls", "stream_options"}

    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Whole | None = None
    stop: Texts | None = None
    structured_outputs: StructuredOutputs | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    top_logprobs: Whole | None = None
    include: Items[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: Annotated[Any, only(False, advice="read the answer as a stream")] = None
    conversation: Annotated[Any, only(advice="use previous_response_id")] = None
    prompt: Annotated[Any, only(advice="write the prompt into input")] = None
    access_programs: Annotated[Any, only([])] = None
    background_options: Annotated[Any, only({})] = None
    context_management: Annotated[Any, only([], advice="shorten the input yourself")] = None
    image: Annotated[Any, only()] = None
    moderation: Annotated[Any, only()] = None
    enable_response_messages: Annotated[Any, only(False)] = None
    previous_input_messages: Annotated[Any, only([], advice="use previous_response_id")] = None
