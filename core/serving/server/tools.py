"""Calls of functions: the description for the model, and the way from text to calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from opgraft.engine.sampling.structured import WHITESPACE
from opgraft.errors import HTTPError, close_matches
from opgraft.serving.server.call_forms import PLAIN, form_of_template, literal
from opgraft.serving.server.call_reader import CallReader, WrittenCall
from opgraft.serving.server.contradictions import expect_no_contradiction
from opgraft.serving.server.protocol import (
    AllowedToolsChoice,
    ChatRequest,
    FunctionName,
    NamedToolChoice,
    OlderChoice,
    Tool,
    ToolChoice,
)

_INSTRUCTION = """You can call these functions, each described by a JSON schema:
{functions}
To call one, answer with {{"name": its name, "arguments": an object with its arguments}} and \
nothing else."""
"""Text before the first message about functions, for templates without a place for tools."""

_MARKED = r"""%llguidance {{}}
start: (first call* {closing})? TEXT
first: head {body}
call: next {body}
head{lazy}: TEXT {opening} {marker}
next{lazy}: TEXT {marker}
{rules}
SPACE: /[ \n\t]{{0,16}}/
TEXT: /(.|\n)*/
"""
"""Grammar of text in which a call follows each marker."""

_MARKED_OR_FORM = r"""%llguidance {{}}
start: SPACE (first call* {closing} TEXT | %json {form} SPACE)
first: {opening} {marker} {body}
call: next {body}
next{lazy}: TEXT {marker}
{rules}
SPACE: /[ \n\t]{{0,16}}/
TEXT: /(.|\n)*/
"""
"""Grammar of calls, each behind a marker, or else of an answer of a form."""

_PLAIN = r"""%llguidance {{}}
start: SPACE (%json {call} SPACE | TEXT)?
SPACE: /[ \n\t]{{0,16}}/
TEXT: /[^{{\[ \n\t](.|\n)*/
"""
"""Grammar of a call, or several, or else of text that does not begin as one."""

SPACED = MappingProxyType({"x-guidance": {"whitespace_pattern": WHITESPACE}})
"""Bounds the blanks of JSON. Small models fill answers with blanks."""


NAMES_OF_OLDER_FORM = MappingProxyType(
    {"tools": "functions", "function.parameters": "parameters", "tool_choice": "function_call"}
)
"""Parts of names of requests with tools → parts of names of OpenAI's older form."""


def with_tools(body: ChatRequest) -> ChatRequest:
    """Return a request with tools in place of the functions of OpenAI's older form.

    This form has no more than one call in an answer.

    Raises:
        HTTPError: the request has fields of both forms.
    """
    if not body.functions:
        return body
    expect_no_contradiction(body)
    choice: ToolChoice | None
    if isinstance(body.function_call, OlderChoice):
        name = FunctionName(name=body.function_call.name)
        choice = NamedToolChoice(type="function", function=name)
    else:
        choice = body.function_call
    tools = [Tool(type="function", function=function) for function in body.functions]
    translated = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    older = {"functions": None, "function_call": None}
    return body.model_copy(update={**older, **translated})


class Tools:
    """The functions of a request, and the form of calls by the model.

    Args:
        body: of the request.
        template: of the model's chats, as source.

    Attributes:
        functions: for the template; None if the model should know no function.
        known: the names of functions.
        most: the most calls of an answer; None for any number.
        instruction: a text about the functions, for a template without a place for them.
        forced: the JSON schema of an answer that must be a call, else None.
        forced_field: the field of the request with this schema.
        strict: True if calls of a function must follow the schema.

    Raises:
        HTTPError: the chosen or an allowed function is missing.
    """

    def __init__(self, body: ChatRequest, template: str) -> None:
        tools, choice = _allowed(body)
        offered = [tool.model_dump(exclude_none=True) for tool in tools]
        functions = [tool["function"] for tool in offered]
        chosen = _chosen(choice, offered)

        self.functions = offered or None
        self.instruction = None
        if offered and "tools" not in template:
            described = "\n".join(map(json.dumps, functions))
            self.instruction = _INSTRUCTION.format(functions=described)

        self.forced = _forced([functions[place] for place in chosen])
        self.forced_field = "tools"
        self._only: str | None = None
        if len(chosen) == 1:
            (place,) = chosen
            number = (body.tools or ()).index(tools[place])
            self.forced_field = f"tools[{number}].function.parameters"
            self._only = functions[place]["name"]

        self.strict = any(function.get("strict") for function in functions)
        self.known = {function["name"] for function in functions}
        self.most = 1 if body.parallel_tool_calls is False else None
        self._offered = functions
        self._chosen = chosen
        self._form = form_of_template(template)

    def structured_output(
        self, special: Callable[[str], int | None], form: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        """Return the structured output of an answer that must or may be a call.

        Calls of strict functions follow the schemas. With a form, any other answer has the form.

        Args:
            special: returns the id of a special token for the text of the token, or None.
            form: the JSON schema of any other answer.

        Returns:
            None if any text is an answer.
        """
        if self.forced is not None:
            return {"json": self.forced}
        if not self._offered or not (self.strict or form is not None):
            return None
        if self._form is PLAIN and form is not None:
            return {"json": self._schema_of_calls(_identified(form, "urn:opgraft:form"))}
        if self._form is PLAIN:
            return {"grammar": _PLAIN.format(call=json.dumps(self._schema_of_calls()))}
        spaced = None if form is None else {**SPACED, **form}
        # Special tokens end a text by themselves.
        lazy = "[lazy]" if special(self._form.marker) is None else ""
        grammar = _MARKED if form is None else _MARKED_OR_FORM
        written = grammar.format(
            **self._rules_of_calls(special),
            form=json.dumps(spaced),
            lazy=lazy,
            opening=literal(self._form.opening, special),
            marker=literal(self._form.marker, special),
            closing=literal(self._form.closing, special),
        )
        return {"grammar": written}

    def _rules_of_calls(self, special: Callable[[str], int | None]) -> dict[str, str]:
        """Return the body of a call behind its marker, and further rules of the grammar."""
        if self._form.parts is None:
            return {"body": f"SPACE %json {json.dumps(self._schema_of_calls())}", "rules": ""}
        rules = [
            self._form.rule(name, json.dumps(schema), special)
            for name, schema in self.schemas_of_arguments()
        ]
        return {"body": "body", "rules": "body: " + " | ".join(rules)}

    def schemas_of_arguments(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the names of functions that may be called, with schemas of their arguments.

        Only strict functions and forced calls are held to the parameters.
        """
        schemas = []
        for place in self._chosen or range(len(self._offered)):
            function = self._offered[place]
            is_held = function.get("strict") or self._chosen
            held = function if is_held else {"name": function["name"]}
            schema = {**SPACED, **_parameters_of(held, f"urn:opgraft:tool:{place}")}
            schemas.append((function["name"], schema))
        return schemas

    def _schema_of_calls(self, *others: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema of one call, of a list of calls, or of an answer of another schema."""
        schemas = []
        for place, function in enumerate(self._offered):
            held = function if function.get("strict") else {"name": function["name"]}
            schemas.append(_schema_of(held, f"urn:opgraft:tool:{place}"))
        call = {"$ref": "#/$defs/call"}
        return {
            "anyOf": [call, {"type": "array", "items": call, "minItems": 1}, *others],
            "$defs": {"call": {"anyOf": schemas}},
            **SPACED,
        }

    def reader(self) -> CallReader | None:
        """Return a reader for the calls of an answer, or None if the model knows no function."""
        if self.functions is None:
            return None
        form = PLAIN if self.forced is not None else self._form
        return CallReader(form, self.known, self.most)

    def plain(self, reader: CallReader | None, text: str) -> str:
        """Return the part of a read text that is surely no call."""
        if reader is None:
            return text
        return "" if self.forced is not None else reader.plain(text)

    def calls(self, found: Sequence[WrittenCall], ended: bool) -> Sequence[WrittenCall]:
        """Return the calls that a reader has found, or the only possible one."""
        # The answer was cut before the name, but only one function was possible.
        if ended and not found and self._only is not None:
            return [WrittenCall(self._only, "")]
        return found


_CLOSED_BY = {"type", "properties", "required", "title", "description", "$defs", "$schema"}
"""Parameters with no other keyword have only the arguments in their properties."""


def _allowed(body: ChatRequest) -> tuple[Sequence[Tool], Any]:
    """Return the tools that may be called, and the choice among them.

    Raises:
        HTTPError: an allowed function is missing.
    """
    choice = body.tool_choice
    if choice == "none":
        return (), choice
    tools = body.tools or ()
    if not isinstance(choice, AllowedToolsChoice):
        return tools, choice
    names = {each.function.name for each in choice.allowed_tools.tools}
    allowed = [tool for tool in tools if tool.function.name in names]
    missing = names - {tool.function.name for tool in allowed}
    if missing:
        raise _unknown_function("allows", min(missing), [tool.function.name for tool in tools])
    return allowed, choice.allowed_tools.mode


def _chosen(choice: Any, offered: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of the functions for a forced call. Empty if no call is forced."""
    if choice in (None, "none", "auto"):
        return []
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    names = [tool["function"]["name"] for tool in offered]
    chosen = [place for place, each in enumerate(names) if name in (None, each)]
    if chosen:
        return chosen
    if name is None:
        message = f"tool_choice is {choice!r}, and the request has no tools: give tools"
        raise HTTPError(400, message, field="tool_choice", code="invalid_value")
    raise _unknown_function("asks for", name, names)


def _unknown_function(asks: str, name: str, known: Sequence[str]) -> HTTPError:
    """Return the error about a choice of a function that is not there."""
    advice = close_matches(name, known)
    message = (
        f"tool_choice {asks} the function {name!r:.80}, which the request does not have: {advice}"
    )
    return HTTPError(400, message, field="tool_choice", code="invalid_value")


def _forced(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the schema of an answer that calls one of some functions."""
    schemas = [
        _schema_of(function, f"urn:opgraft:tool:{place}")
        for place, function in enumerate(functions)
    ]
    return {"anyOf": schemas} if schemas else None


def _identified(schema: Mapping[str, Any], identity: str) -> dict[str, Any]:
    """Return a schema with an identity, so that references within the schema start there."""
    identified = {"$id": identity, **schema}
    # Draft 4 has no $id.
    if "draft-04" in str(identified.get("$schema")):
        del identified["$schema"]
    return identified


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return parameters that allow no argument beyond their properties.

    Small models add arguments without an end, and some clients leave ``additionalProperties`` out.
    Parameters of another form may have more properties elsewhere, so they stay open. So do
    parameters that demand an argument without a property.
    """
    properties = parameters.get("properties")
    required = parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return parameters
    if not parameters.keys() <= _CLOSED_BY:
        return parameters
    # The names may be of any type, as nothing has checked the schema yet.
    named = list(properties)
    if all(name in named for name in required):
        return {**parameters, "additionalProperties": False}
    return parameters


def _schema_of(function: Mapping[str, Any], identity: str) -> dict[str, Any]:
    """Return the schema of a call."""
    arguments = _parameters_of(function, identity)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters_of(function: Mapping[str, Any], identity: str) -> dict[str, Any]:
    """Return the schema of the arguments of a call.

    The parameters get an identity, so that references within the parameters start there.
    """
    return _identified(_closed(function.get("parameters") or {"type": "object"}), identity)
