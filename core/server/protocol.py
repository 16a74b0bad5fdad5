"""Bodies of requests, by the names of OpenAI's interface, and of vLLM's where that has more.

A field that is not listed, or has a value that is not supported, is an error that names it. ``null`` stands for a field
that is left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_Tokens = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """Base of the bodies, which take what is declared and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None
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


class CompletionRequest(Generation):
    """The body of ``/v1/completions``."""

    prompt: str | list[str] | list[_Tokens] | list[list[_Tokens]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


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


class ChatMessage(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)


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


class ChatRequest(Generation):
    """The body of ``/v1/chat/completions``."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class EmbeddingRequest(Body):
    """The body of ``/v1/embeddings``."""

    model: str
    input: str | list[str] | list[_Tokens] | list[list[_Tokens]]
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class TokenizeRequest(Body):
    """The body of ``/tokenize``: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: list[_Tokens]
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
