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
    """What a stream has besides the answers."""

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


class ChatRequest(Generation):
    """The body of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
