"""The form of an answer, by the names of OpenAI, of vLLM and of llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from opgraft.engine.structured_form import expect_form
from opgraft.errors import HTTPError
from opgraft.serving.server.faults import at
from opgraft.serving.server.protocol import GenerationFields, ResponseFormat, StructuredOutputs

OF_OPENAI = "response_format"
"""The field of OpenAI with the form of an answer."""

_ANY_OBJECT = {"type": "object"}


class AnswerForm(NamedTuple):
    """The form of an answer.

    Attributes:
        field: of the request, for errors.
        spec: as ``SamplingParams.structured_output`` takes it, such as ``{"regex": "a+"}``.
    """

    field: str
    spec: dict[str, Any]


def form_of(body: GenerationFields) -> AnswerForm | None:
    """Return the form of an answer, or None if any text is an answer.

    Raises:
        HTTPError: a schema is missing or is no object, a list is empty, or two fields give a form.
    """
    forms = list(_forms(body))
    if len(forms) > 1:
        first, second, *_ = forms
        raise _refusal_of(second.field, f"and {first.field} are both given: leave one out")
    if not forms:
        return None
    (form,) = forms
    with at(form.field):
        expect_form(form.spec)
    return form


def _forms(body: GenerationFields) -> Iterator[AnswerForm]:
    if body.response_format is not None:
        yield from _of_openai(body.response_format)
    if body.structured_outputs is not None:
        yield from _of_vllm(body.structured_outputs)
    older = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    yield from _given_kind(older, "guided_")
    yield from _of_llama_cpp(body)


def _of_openai(given: ResponseFormat) -> Iterator[AnswerForm]:
    field = OF_OPENAI
    if given.type == "json_object":
        yield AnswerForm(field, {"json": _ANY_OBJECT})
    if given.type != "json_schema":
        return
    described = given.json_schema
    if described is None:
        raise _missing(f"{field}.json_schema")
    if described.schema_ is None:
        raise _missing(f"{field}.json_schema.schema")
    yield AnswerForm(field, {"json": described.schema_})


def _of_vllm(given: StructuredOutputs) -> Iterator[AnswerForm]:
    prefix = "structured_outputs."
    if given.json_object:
        yield AnswerForm(f"{prefix}json_object", {"json": _ANY_OBJECT})
    kinds = {
        "json": given.json_,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
    }
    yield from _given_kind(kinds, prefix)


def _of_llama_cpp(body: GenerationFields) -> Iterator[AnswerForm]:
    if body.json_schema is not None:
        yield AnswerForm("json_schema", {"json": _schema(body.json_schema, "json_schema")})
    # An empty grammar is llama.cpp's default.
    if body.grammar:
        yield AnswerForm("grammar", {"grammar": body.grammar})


def _given_kind(kinds: Mapping[str, Any], prefix: str) -> Iterator[AnswerForm]:
    for kind, value in kinds.items():
        if value is None:
            continue
        field = prefix + kind
        yield AnswerForm(field, {kind: _schema(value, field) if kind == "json" else value})


def _schema(given: str | dict[str, Any], field: str) -> dict[str, Any]:
    """Return a JSON schema, from an object or its text."""
    if isinstance(given, dict):
        return given
    try:
        schema = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise _refusal_of(field, "is a text that is no JSON: give a JSON schema") from error
    if not isinstance(schema, dict):
        raise _refusal_of(field, "is a text without an object: give a JSON schema")
    return schema


def _missing(field: str) -> HTTPError:
    return HTTPError(400, f"{field} is missing", field=field, code="missing_field")


def _refusal_of(field: str, reason: str) -> HTTPError:
    return HTTPError(400, f"{field} {reason}", field=field, code="invalid_value")
