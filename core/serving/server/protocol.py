"""Bodies of requests, with the names of OpenAI's interface, and more names of vLLM's.

Clients send fields of other servers, and send back answers of other servers. So a field without an
effect here is taken, and an unknown field is ignored and named in a header of the answer, unless
``server.unknown_fields`` says ``refuse``. If a field would change the answer and this server cannot
follow, the request is refused with the name of the field. ``null`` stands for an absent field.

A check ends at the first fault of a body, so that a body with many faults takes no more time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
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


def told_apart(choose: Callable[[Any], TypeAdapter[Any]]) -> WrapValidator:
    """Return the validator of a union. A function chooses the alternative by the value.

    Errors are about this alternative, and each item is looked at once.
    """
    return WrapValidator(lambda value, _: choose(value).validate_python(value, strict=True))


class UnknownFields:
    """The unknown fields of one request.

    Args:
        refused: raise at the first one, instead of ignoring it.

    Attributes:
        names: of ignored fields, such as ``messages[].mood``, each once.
    """

    def __init__(self, refused: bool = False) -> None:
        self.refused = refused
        self.names: dict[str, None] = {}


_UNKNOWN_FIELDS: ContextVar[UnknownFields | None] = ContextVar("unknown fields", default=None)


@contextmanager
def unknown_fields(refused: bool) -> Iterator[UnknownFields]:
    """Collect the unknown fields of all bodies that the block checks."""
    found = UnknownFields(refused)
    token = _UNKNOWN_FIELDS.set(found)
    try:
        yield found
    finally:
        _UNKNOWN_FIELDS.reset(token)


_LONGEST_NAME = 80
"""Characters of an unknown field's name in the header, and of a value in an error."""

_MOST_NAMES = 32
"""Most names of ignored fields in an answer."""


class Body(BaseModel):
    """Base of the bodies.

    Attributes:
        place: of such objects in the body of a request, such as ``messages[].``.
        without_effect: fields of other servers. They change no answer of this one.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )
    place: ClassVar[str] = ""
    without_effect: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="wrap")
    @classmethod
    def _leave_out_others(cls, given: Any, validated: ModelWrapValidatorHandler[Body]) -> Body:
        """Leave out fields without an effect, unknown fields, and fields that are null."""
        names = _names_of_fields(cls)
        if not isinstance(given, dict) or given.keys() <= names:
            return validated(given)
        kept = {name: value for name, value in given.items() if name in names}
        body = validated(kept)
        known = names | cls.without_effect
        unknown = (name for name in given if name not in known)
        set_ones = (name for name in unknown if given[name] is not None)
        fields = _UNKNOWN_FIELDS.get() or UnknownFields()
        room = max(0, _MOST_NAMES - len(fields.names))
        for name in islice(set_ones, room):
            if fields.refused:
                raise _unknown_field(cls, name, names)
            place = cls.place + _printable(name[:_LONGEST_NAME])
            fields.names[place] = None
        return body


def _unknown_field(body: type[Body], name: str, known: frozenset[str]) -> ValidationError:
    told = PydanticCustomError("extra_forbidden", "no such field", {"known": sorted(known)})
    fault = InitErrorDetails(type=told, loc=(_printable(name),), input=None)
    return ValidationError.from_exception_data(body.__name__, [fault])


def _printable(name: str) -> str:
    """Return the name of a field for an error, without halves of surrogate pairs."""
    return name.encode(errors="replace").decode()


@cache
def _names_of_fields(body: type[Body]) -> frozenset[str]:
    names = []
    for name, field in body.model_fields.items():
        # Some names of OpenAI are taken in pydantic, such as "schema".
        names.append(field.alias or name)
    return frozenset(names)


def _whole(value: Any) -> Any:
    # JSON of some clients writes 4.0 for 4.
    if type(value) is float and value.is_integer():
        return int(value)
    return value


Whole: TypeAlias = Annotated[int, BeforeValidator(_whole)]
"""A whole number, perhaps written as ``4.0``. Not for long lists: each item calls Python."""


def only(*accepted: Any, advice: str = "leave it out") -> BeforeValidator:
    """Return the validator of a field with few values that this server can follow.

    Args:
        *accepted: values that change no answer.
        advice: for other values.
    """

    def expect_accepted(value: Any) -> Any:
        if value is None:
            return None
        if any(_is_same(value, each) for each in accepted):
            return None
        told = {"value": _shown(value, accepted), "advice": advice}
        raise PydanticCustomError("not_followed", "not supported", told)

    return BeforeValidator(expect_accepted)


def _is_same(value: Any, accepted: Any) -> bool:
    # True is no 1 here.
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


def _shown(value: object, accepted: Iterable[object]) -> str:
    """Return a value for an error.

    The log has the error, and no prompts. So a text is shown only for a field of a few words.
    """
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    has_words = any(isinstance(each, str) and each for each in accepted)
    if isinstance(value, str) and not has_words:
        return "a text"
    return json.dumps(value)[:_LONGEST_NAME]


def _expect_finite(given: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(given, allow_nan=False)
    except ValueError as error:
        raise PydanticCustomError("infinite_inside", "a number is not finite") from error
    return given


ToldObject: TypeAlias = Annotated[dict[str, Any], AfterValidator(_expect_finite)]
"""An object that an answer repeats."""

_Token = Annotated[int, Field(ge=0)]
_TEXT: TypeAdapter[Any] = TypeAdapter(str)
_TEXTS: TypeAdapter[Any] = TypeAdapter(Items[str])
_OBJECT: TypeAdapter[Any] = TypeAdapter(dict[str, Any])
_TOKENS: TypeAdapter[Any] = TypeAdapter(Items[_Token])
_LISTS_OF_TOKENS: TypeAdapter[Any] = TypeAdapter(Items[Items[_Token]])


def _prompts(given: object) -> TypeAdapter[Any]:
    """Return the type of prompts by the first prompt."""
    if not isinstance(given, list):
        return _TEXT
    first = given[0] if given else None
    if isinstance(first, str):
        return _TEXTS
    return _LISTS_OF_TOKENS if isinstance(first, list) else _TOKENS


Prompts: TypeAlias = Annotated[
    str | list[str] | list[_Token] | list[list[_Token]], told_apart(_prompts)
]
"""One prompt or several, as text or as token ids."""

Texts: TypeAlias = Annotated[
    str | list[str], told_apart(lambda given: _TEXTS if isinstance(given, list) else _TEXT)
]
"""A text, or several."""


def _up_to_wrong(right: Callable[[Any], bool]) -> BeforeValidator:
    """Return a validator that cuts a mapping down to the first wrong item, if there is one.

    So the error is about one item.
    """

    def first_wrong(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            if not right(value):
                return {name: value}
        return given

    return BeforeValidator(first_wrong)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


_VECTORS = "POST /v1/embeddings has it"
_CHATS = "POST /v1/chat/completions has it"
_INPUT = "write the texts into input"
_PENALTIES = "use repetition_penalty, presence_penalty or frequency_penalty"
_FROM_END = "truncate_prompt_tokens keeps the end of a prompt, so shorten the prompt yourself"
_OFFSETS = "text_offset in the logprobs of POST /v1/completions has them"
_SAMPLERS = [
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
]
"""The order of llama.cpp's samplers by default."""

_IN_SCHEMA = "write additionalProperties into the schema"


class StreamOptions(Body):
    """Further chunks of a stream."""

    place = "stream_options."
    without_effect = frozenset({"include_obfuscation"})

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JSONSchemaFormat(Body):
    """A JSON schema with its name."""

    place = "response_format.json_schema."

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer."""

    place = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None


Schema: TypeAlias = Annotated[
    str | dict[str, Any],
    told_apart(lambda given: _TEXT if isinstance(given, str) else _OBJECT),
]
"""A JSON schema, as text or as an object."""


class StructuredOutputs(Body):
    """The form of an answer with vLLM's names. One field is given."""

    place = "structured_outputs."
    without_effect = frozenset({"disable_fallback"})

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[Any, only(advice="use tools, or write a grammar")] = None
    disable_any_whitespace: Annotated[Any, only(False)] = None
    disable_additional_properties: Annotated[Any, only(False, advice=_IN_SCHEMA)] = None
    whitespace_pattern: Annotated[Any, only()] = None


class SamplingFields(Body):
    """Fields of every request for generated text, in each interface: the model and the sampling.

    Fields without an effect are about routing, storage and billing at OpenAI, hints for a faster
    answer, and vLLM's way to compute.
    """

    without_effect = frozenset(
        {
            *("reasoning_effort", "verbosity", "prediction", "store", "service_tier"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
            *("safety_identifier", "request_id", "skip_reading_prefix_cache"),
            "guided_decoding_backend",
        }
    )

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Whole | None = None
    stop_token_ids: Items[int] | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    logit_bias: Annotated[dict[str, float], _up_to_wrong(_is_number)] | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    priority: Whole | None = None
    cache_salt: str | None = None
    user: str | None = None
    metadata: (
        Annotated[dict[str, str], _up_to_wrong(lambda value: isinstance(value, str))] | None
    ) = None
    include_reasoning: Annotated[Any, only(True)] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    vllm_xargs: Annotated[Any, only({})] = None
    watermarking: Annotated[Any, only(False)] = None


class LlamaCppFields(SamplingFields):
    """Fields of every request for generated text, with the names of llama.cpp's server.

    Most are samplers that this server lacks, so only values that switch the sampler off are taken.
    """

    n_predict: Whole | None = None
    grammar: str | None = None
    json_schema: Schema | None = None
    n_cmpl: Annotated[Any, only(1, advice="use n")] = None
    n_indent: Annotated[Any, only(0, advice="use grammar")] = None
    n_probs: Annotated[Any, only(0, advice="use logprobs")] = None
    min_keep: Annotated[Any, only(0, 1)] = None
    post_sampling_probs: Annotated[Any, only(False)] = None
    return_tokens: Annotated[Any, only(False, advice="use return_token_ids")] = None
    t_max_predict_ms: Annotated[Any, only(0, -1, advice="use max_tokens")] = None
    repeat_penalty: Annotated[Any, only(1, advice="use repetition_penalty")] = None
    # Penalties count all tokens here, and 64 is the default there.
    repeat_last_n: Annotated[Any, only(64, -1, advice=_PENALTIES)] = None
    typical_p: Annotated[Any, only(1)] = None
    top_n_sigma: Annotated[Any, only(-1, 0)] = None
    dry_multiplier: Annotated[Any, only(0, advice=_PENALTIES)] = None
    xtc_probability: Annotated[Any, only(0)] = None
    dynatemp_range: Annotated[Any, only(0, advice="use temperature")] = None
    mirostat: Annotated[Any, only(0, advice="use top_p or min_p")] = None
    adaptive_target: Annotated[Any, only(-1)] = None
    samplers: Annotated[Any, only([], _SAMPLERS)] = None
    lora: Annotated[Any, only([], advice="name the adapter in model")] = None


class GenerationFields(LlamaCppFields):
    """Fields of every request for generated text, with the names of chats and completions."""

    n: Whole | None = None
    stop: Texts | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Annotated[Any, only()] = None
    stream_options: StreamOptions | None = None
    use_beam_search: Annotated[Any, only(False)] = None
    length_penalty: Annotated[Any, only(1)] = None
    prompt_logprobs: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    return_tokens_as_token_ids: bool | None = None
    logits_processors: Annotated[Any, only([])] = None
    prompt_embeds: Annotated[Any, only()] = None
    truncation_side: Annotated[Any, only("left", advice=_FROM_END)] = None
    logprob_token_ids: Annotated[Any, only([], advice="use top_logprobs or logprobs")] = None
    repetition_detection: Annotated[Any, only(advice=_PENALTIES)] = None
    return_token_offsets: Annotated[Any, only(False, advice=_OFFSETS)] = None
    return_weight_versions: Annotated[Any, only(False)] = None
    routed_experts_prompt_start: Annotated[Any, only(0)] = None


class CompletionRequest(GenerationFields):
    """The body of ``/v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Whole | None = None
    best_of: Annotated[Any, only(1, advice="use n")] = None
    suffix: Annotated[Any, only("")] = None
    thinking_token_budget: Annotated[Any, only(advice=_CHATS)] = None
    add_special_tokens: Annotated[Any, only(True)] = None


class TextPart(Body):
    """A text as a part of a message."""

    place = "messages[].content[]."

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """The reason of a refusal, as a part of an answer."""

    place = "messages[].content[]."

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


_PART: TypeAdapter[Any] = TypeAdapter(TextPart)
_REFUSAL: TypeAdapter[Any] = TypeAdapter(RefusalPart)


def _part(given: object) -> TypeAdapter[Any]:
    """Return the type of a part."""
    kind = given.get("type") if isinstance(given, dict) else None
    return _REFUSAL if kind == "refusal" else _PART


Part: TypeAlias = Annotated[TextPart | RefusalPart, told_apart(_part)]
_PARTS: TypeAdapter[Any] = TypeAdapter(Items[Part])
Content: TypeAlias = Annotated[
    str | list[TextPart | RefusalPart],
    told_apart(lambda given: _PARTS if isinstance(given, list) else _TEXT),
]
"""The text of a message, whole or in parts."""


def _as_text(given: Any) -> Any:
    return given if given is None or isinstance(given, str | dict) else json.dumps(given)


Arguments: TypeAlias = Annotated[str | dict[str, Any] | None, BeforeValidator(_as_text)]
"""The arguments of a call in a history: JSON as text, as a rule. They may be anything."""


class CalledFunction(Body):
    """A function with its arguments."""

    place = "messages[].tool_calls[].function."

    name: str
    arguments: Arguments = None


class ToolCall(Body):
    """A call by a model."""

    place = "messages[].tool_calls[]."
    without_effect = frozenset({"index"})  # of the parts of a stream

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class SystemMessage(Body):
    """A message of the operator to the model."""

    place = "messages[]."

    role: Literal["system", "developer"]
    content: Content | None
    name: str | None = None


class UserMessage(Body):
    """A message of a user."""

    place = "messages[]."

    role: Literal["user"]
    content: Content | None
    name: str | None = None


class AssistantMessage(Body):
    """An answer of the model, or its calls.

    An answer without content and calls is one of no text. ``reasoning`` is another name of
    ``reasoning_content``, and ``function_call`` an older form of a single call.
    """

    place = "messages[]."
    without_effect = frozenset({"annotations", "audio"})

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    function_call: CalledFunction | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolMessage(Body):
    """A result of a call."""

    place = "messages[]."

    role: Literal["tool", "function"]
    content: Content | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _AnyMessage(BaseModel):
    """A message without a role, or with an unknown role. The error is about the role."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]


_MESSAGES: dict[object, TypeAdapter[Any]] = {
    "system": TypeAdapter(SystemMessage),
    "developer": TypeAdapter(SystemMessage),
    "user": TypeAdapter(UserMessage),
    "assistant": TypeAdapter(AssistantMessage),
    "tool": TypeAdapter(ToolMessage),
    "function": TypeAdapter(ToolMessage),
}
_ANY_MESSAGE: TypeAdapter[Any] = TypeAdapter(_AnyMessage)


def _message(given: object) -> TypeAdapter[Any]:
    role = given.get("role") if isinstance(given, dict) else None
    return _MESSAGES.get(role, _ANY_MESSAGE) if isinstance(role, str) else _ANY_MESSAGE


ChatMessage: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, told_apart(_message)
]
"""A message of a chat."""


class Function(Body):
    """A function that a model may call."""

    place = "tools[].function."

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool. Functions are the only kind."""

    place = "tools[]."

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    place = "tool_choice.function."

    name: str


class NamedToolChoice(Body):
    """The choice of one function."""

    place = "tool_choice."

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """Some of the functions, and whether the model must call one of them."""

    place = "tool_choice.allowed_tools."

    mode: Literal["auto", "required"]
    tools: Items[NamedToolChoice]


class AllowedToolsChoice(Body):
    """The choice among some of the functions."""

    place = "tool_choice."

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_by_form(named: type[Body], allowed: type[Body]) -> WrapValidator:
    """Return the validator of a choice of tools: a word, one tool, or some tools."""
    of_word: TypeAdapter[Any] = TypeAdapter(Literal["none", "auto", "required"])
    of_one: TypeAdapter[Any] = TypeAdapter(named)
    of_some: TypeAdapter[Any] = TypeAdapter(allowed)

    def by_form(given: object) -> TypeAdapter[Any]:
        if not isinstance(given, dict):
            return of_word
        return of_some if given.get("type") == "allowed_tools" else of_one

    return told_apart(by_form)


ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice,
    choice_by_form(NamedToolChoice, AllowedToolsChoice),
]
"""Choice of no tool, any, one, or some."""


class OlderFunction(Function):
    """A function that a model may call, in OpenAI's older form."""

    place = "functions[]."


class OlderChoice(FunctionName):
    """The choice of one function, in OpenAI's older form."""

    place = "function_call."


_OLDER_CHOICE: TypeAdapter[Any] = TypeAdapter(Literal["none", "auto"])
_OLDER_NAMED_CHOICE: TypeAdapter[Any] = TypeAdapter(OlderChoice)
OlderToolChoice: TypeAlias = Annotated[
    Literal["none", "auto"] | OlderChoice,
    told_apart(lambda given: _OLDER_NAMED_CHOICE if isinstance(given, dict) else _OLDER_CHOICE),
]
"""Choice of no function, any, or one, in OpenAI's older form."""


class ChatRequest(GenerationFields):
    """The body of ``/v1/chat/completions``."""

    messages: Items[ChatMessage]
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Items[Literal["text"]] | None = None
    audio: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    functions: Items[OlderFunction] | None = None
    function_call: OlderToolChoice | None = None
    documents: Annotated[Any, only([])] = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Annotated[Any, only(False)] = None
    echo: Annotated[Any, only(False)] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None
    moderation: Annotated[Any, only()] = None
    return_prompt_text: Annotated[Any, only(False, advice="use return_token_ids")] = None
    reasoning_budget_tokens: Annotated[Any, only(-1, advice="use thinking_token_budget")] = None
    reasoning_control: Annotated[Any, only(False)] = None
    reasoning_format: Annotated[Any, only("auto", "deepseek")] = None


class _PoolingFields(Body):
    """Fields of every request to an encoder, with vLLM's names."""

    truncate_prompt_tokens: Whole | None = None
    truncation_side: Annotated[Any, only("right")] = None
    use_activation: Annotated[Any, only(True)] = None
    padding: Annotated[Any, only(False)] = None


class _VectorFields(_PoolingFields):
    """Fields of ``/v1/embeddings`` and ``/pooling``: the form of the numbers."""

    embed_dtype: Annotated[Any, only("float32")] = None
    endianness: Annotated[Any, only("native", "little")] = None


class _TextFields(_PoolingFields):
    """Fields of requests for texts one by one.

    A chat is refused, so fields that only shape its prompt have no effect.
    """

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message"}
    )

    model: str | None = None
    input: Prompts
    user: str | None = None
    add_special_tokens: Annotated[Any, only(True)] = None
    messages: Annotated[Any, only(advice=_INPUT)] = None


class EmbeddingRequest(_TextFields, _VectorFields):
    """The body of ``/v1/embeddings``."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = None


class ClassifyRequest(_TextFields):
    """The body of ``/classify``: texts."""


class PoolingRequest(_TextFields, _VectorFields):
    """The body of ``/pooling``: texts."""

    encoding_format: Annotated[Any, only("float", advice=_VECTORS)] = None
    dimensions: Annotated[Any, only(advice=_VECTORS)] = None
    task: Annotated[Any, only("embed", "classify")] = None
    data: Annotated[Any, only(advice=_INPUT)] = None


class _ScoringFields(_PoolingFields):
    """Fields of ``/score`` and ``/rerank``."""

    max_tokens_per_doc: Annotated[Any, only(advice="use truncate_prompt_tokens")] = None
    max_tokens_per_query: Annotated[Any, only()] = None
    instruction: Annotated[Any, only("", advice="write it into the query")] = None
    chat_template_kwargs: Annotated[Any, only({})] = None


class Document(Body):
    """A document as an object."""

    place = "documents[]."

    text: str


_DOCUMENT: TypeAdapter[Any] = TypeAdapter(Document)
_AnyDocument: TypeAlias = Annotated[
    str | Document,
    told_apart(lambda given: _DOCUMENT if isinstance(given, dict) else _TEXT),
]


_DOCUMENTS: TypeAdapter[Any] = TypeAdapter(Items[_AnyDocument])
Documents: TypeAlias = Annotated[
    str | list[str | Document],
    told_apart(lambda given: _DOCUMENTS if isinstance(given, list) else _TEXT),
]
"""A document, or several."""


class ScoreRequest(_ScoringFields):
    """The body of ``/score``: one text, and others to compare with it, or texts in pairs.

    Attributes:
        pairs: the fields of the first texts and of the others, with each of vLLM's names.
    """

    pairs: ClassVar[Sequence[tuple[str, str]]] = (
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    )

    model: str | None = None
    text_1: Documents | None = None
    text_2: Documents | None = None
    queries: Documents | None = None
    documents: Documents | None = None
    items: Documents | None = None
    data_1: Documents | None = None
    data_2: Documents | None = None
    user: str | None = None


class RerankRequest(_ScoringFields):
    """The body of ``/rerank``, with the names of Jina and Cohere."""

    model: str | None = None
    query: str
    documents: Documents
    top_n: Whole | None = None
    return_documents: bool | None = None
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
    chat_template: str | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    content: Annotated[Any, only(advice="use prompt")] = None
    add_special: Annotated[Any, only(advice="use add_special_tokens")] = None
    parse_special: Annotated[Any, only(True)] = None
    with_pieces: Annotated[Any, only(False, advice="use return_token_strs")] = None


class DetokenizeRequest(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: Items[_Token]
    skip_special_tokens: bool | None = None


class LoadAdapterRequest(Body):
    """The body of ``/v1/load_lora_adapter``."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool = False


class UnloadAdapterRequest(Body):
    """The body of ``/v1/unload_lora_adapter``."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: str


class ErrorDetail(Body):
    """The message of an error, and the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Body):
    """The answer to a refused or failed request."""

    error: ErrorDetail
