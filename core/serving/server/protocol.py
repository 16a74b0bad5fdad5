"""Bodies of requests, by the names of OpenAI's interface, and of vLLM's where that has more.

A field that is not listed, or has a value that is not supported, is an error that names it. ``null`` stands for a field
that is left out. Of the faults of a body the first is told and the rest is not looked for, so that the time of a check
does not depend on how wrong a body is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

_T = TypeVar("_T")
Items: TypeAlias = Annotated[list[_T], Field(fail_fast=True)]
"""A list that is looked at up to its first wrong item."""


def _told_apart(choose: Callable[[Any], TypeAdapter[Any]]) -> WrapValidator:
    """Return the validator of a union that finds out by a value which alternative is meant.

    Errors are those of this alternative, with its fields, and each item is looked at once.
    """
    return WrapValidator(lambda value, _: choose(value).validate_python(value, strict=True))


class Body(BaseModel):
    """Base of the bodies, which take what is declared and nothing else."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="wrap")
    @classmethod
    def _expect_known(cls, given: Any, validated: ModelWrapValidatorHandler[Body]) -> Body:
        """Leave out fields that there are not, where they are null, and refuse the first of the others."""
        names = _names_of_fields(cls)
        if not isinstance(given, dict) or given.keys() <= names:
            return validated(given)
        body = validated({name: value for name, value in given.items() if name in names})
        refused = next(
            (name for name in given if name not in names and given[name] is not None), None
        )
        if refused is not None:
            unknown = PydanticCustomError(
                "extra_forbidden", "no such field", {"known": sorted(names)}
            )
            fault = InitErrorDetails(type=unknown, loc=(_printable(refused),), input=None)
            raise ValidationError.from_exception_data(cls.__name__, [fault])
        return body


def _printable(name: str) -> str:
    """Return the name of a field as an error can have it, without halves of surrogate pairs."""
    return name.encode(errors="replace").decode()


@cache
def _names_of_fields(body: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


_Token = Annotated[int, Field(ge=0)]
_TEXT: TypeAdapter[Any] = TypeAdapter(str)
_TEXTS: TypeAdapter[Any] = TypeAdapter(Items[str])
_TOKENS: TypeAdapter[Any] = TypeAdapter(Items[_Token])
_LISTS_OF_TOKENS: TypeAdapter[Any] = TypeAdapter(Items[Items[_Token]])


def _prompts(given: object) -> TypeAdapter[Any]:
    """Tell what prompts are by the first of them."""
    if not isinstance(given, list):
        return _TEXT
    first = given[0] if given else None
    return (
        _TEXTS
        if isinstance(first, str)
        else _LISTS_OF_TOKENS
        if isinstance(first, list)
        else _TOKENS
    )


Prompts: TypeAlias = Annotated[
    str | list[str] | list[_Token] | list[list[_Token]], _told_apart(_prompts)
]
"""One prompt or several, as text or as token ids."""

Texts: TypeAlias = Annotated[
    str | list[str], _told_apart(lambda given: _TEXTS if isinstance(given, list) else _TEXT)
]
"""A text, or several."""


def _up_to_wrong(right: Callable[[Any], bool]) -> BeforeValidator:
    """Return a validator that leaves of a mapping its first item whose value is not right, where there is one."""

    def first_wrong(given: Any) -> Any:
        items = given.items() if isinstance(given, dict) else ()
        return next(({name: value} for name, value in items if not right(value)), given)

    return BeforeValidator(first_wrong)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


class StreamOptions(Body):
    """Chunks of a stream besides those of the answers."""

    include_usage: bool | None = None


class JSONSchemaFormat(Body):
    """A JSON schema with its name."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form that an answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None


class Generation(Body):
    """Fields of every request that generates text."""

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Texts | None = None
    stop_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    logit_bias: Annotated[dict[str, float], _up_to_wrong(_is_number)] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    metadata: (
        Annotated[dict[str, str], _up_to_wrong(lambda value: isinstance(value, str))] | None
    ) = None


class CompletionRequest(Generation):
    """The body of ``/v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class TextPart(Body):
    """A part of a message that is text; there are no others."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """A function with its arguments, which are JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that a model made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


_PARTS: TypeAdapter[Any] = TypeAdapter(Items[TextPart])
Content: TypeAlias = Annotated[
    str | list[TextPart], _told_apart(lambda given: _PARTS if isinstance(given, list) else _TEXT)
]
"""The text of a message, whole or in parts."""


class SystemMessage(Body):
    """A message of the operator to the model."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Body):
    """A message of a user."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Body):
    """An answer of the model, or its calls."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)

    @model_validator(mode="after")
    def _expect_something(self) -> AssistantMessage:
        if self.content is None and self.reasoning_content is None and not self.tool_calls:
            fault = InitErrorDetails(type="missing", loc=("content",), input=None)
            raise ValidationError.from_exception_data("AssistantMessage", [fault])
        return self


class ToolMessage(Body):
    """A result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


class _AnyMessage(BaseModel):
    """A message of a role that there is not, or of none, which is what is told of it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]


_MESSAGES: dict[object, TypeAdapter[Any]] = {
    "system": TypeAdapter(SystemMessage),
    "developer": TypeAdapter(SystemMessage),
    "user": TypeAdapter(UserMessage),
    "assistant": TypeAdapter(AssistantMessage),
    "tool": TypeAdapter(ToolMessage),
}
_ANY_MESSAGE: TypeAdapter[Any] = TypeAdapter(_AnyMessage)


def _message(given: object) -> TypeAdapter[Any]:
    role = given.get("role") if isinstance(given, dict) else None
    return _MESSAGES.get(role, _ANY_MESSAGE) if isinstance(role, str) else _ANY_MESSAGE


ChatMessage: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, _told_apart(_message)
]
"""A message of a chat."""


class Function(Body):
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool, of which functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedToolChoice(Body):
    """The choice of one function."""

    type: Literal["function"]
    function: FunctionName


_CHOICE: TypeAdapter[Any] = TypeAdapter(Literal["none", "auto", "required"])
_NAMED_CHOICE: TypeAdapter[Any] = TypeAdapter(NamedToolChoice)
ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice,
    _told_apart(lambda given: _NAMED_CHOICE if isinstance(given, dict) else _CHOICE),
]
"""Choice of no tool, any, or one."""


class ChatRequest(Generation):
    """The body of ``/v1/chat/completions``."""

    messages: Items[ChatMessage]
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Items[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class EmbeddingRequest(Body):
    """The body of ``/v1/embeddings``."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class TokenizeRequest(Body):
    """The body of ``/tokenize``: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = None
    tools: Items[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: Items[_Token]
    skip_special_tokens: bool | None = None


class ErrorDetail(Body):
    """Message of an error, and where it is."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Body):
    """The answer to a request that is refused, or failed."""

    error: ErrorDetail
