"""Calls of functions: how a model learns of functions, and how a text becomes calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opgraft.engine.sampling.structured import WHITESPACE
from opgraft.errors import HTTPError
from opgraft.serving.server.call_reader import HERMES, MISTRAL, PLAIN, Call, CallReader
from opgraft.serving.server.protocol import ChatRequest, NamedToolChoice

_INSTRUCTION = """You can call these functions, each described by a JSON schema:
{functions}
To call one, answer with {{"name": its name, "arguments": an object with its arguments}} and nothing else."""
"""Text before the first message about functions, for templates without a place for tools."""

_MARKED = r"""%llguidance {{}}
start: call* TEXT
call: head SPACE %json {call}
head{lazy}: TEXT {trigger}
SPACE: /[ \n\t]{{0,16}}/
TEXT: /(.|\n)*/
"""
"""Grammar of text in which a call follows each marker."""

_MARKED_OR_FORM = r"""%llguidance {{}}
start: SPACE (first call* TEXT | %json {form} SPACE)
first: {trigger} SPACE %json {call}
call: head SPACE %json {call}
head{lazy}: TEXT {trigger}
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

_SPACED = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
"""Bounds the blanks of JSON, as small models fill an answer with them."""


class Tools:
    """The functions of a request, and the form of calls by the model.

    Args:
        body: of the request.
        template: of the model's chats, as source.

    Attributes:
        functions: as the template gets them; None if the model is not to know of any.
        instruction: a text about the functions, if the template has no place for them.
        forced: the JSON schema of an answer that must be a call; None if it need not be one.
        forced_field: where that schema comes from.
        strict: True if calls of a function are held to its schema.

    Raises:
        HTTPError: a function is chosen that is not there.
    """

    def __init__(self, body: ChatRequest, template: str) -> None:
        tools = body.tools or ()
        if body.tool_choice == "none":
            tools = ()
        offered = [tool.model_dump(exclude_none=True) for tool in tools]
        functions = [tool["function"] for tool in offered]
        chosen = _chosen(body, offered)

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
            self.forced_field = f"tools[{place}].function.parameters"
            self._only = functions[place]["name"]

        self.strict = any(function.get("strict") for function in functions)
        self._offered = functions
        self._known = {function["name"] for function in functions}
        self._most = 1 if body.parallel_tool_calls is False else None
        self._marker = _marker_of(template)

    def structured_output(
        self, special: Callable[[str], int | None], form: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        """Return the structured output of an answer that must be a call, or may be one.

        Calls of strict functions are held to their schemas. With a form, an answer that is no call
        is of the form.

        Args:
            special: the id of a special token by its text, None for a text that is none.
            form: the JSON schema of an answer that is no call.

        Returns:
            None if any text is an answer.
        """
        if self.forced is not None:
            return {"json": self.forced}
        if not self._offered or not (self.strict or form is not None):
            return None
        if self._marker == PLAIN and form is not None:
            return {"json": self._schema_of_calls(_identified(form, "urn:opgraft:form"))}
        spaced = None if form is None else {**_SPACED, **form}
        parts = {"call": json.dumps(self._schema_of_calls()), "form": json.dumps(spaced)}
        if self._marker == PLAIN:
            return {"grammar": _PLAIN.format(**parts)}
        token = special(self._marker)
        trigger = json.dumps(self._marker) if token is None else f"<[{token}]>"
        lazy = "[lazy]" if token is None else ""
        grammar = _MARKED if form is None else _MARKED_OR_FORM
        return {"grammar": grammar.format(**parts, lazy=lazy, trigger=trigger)}

    def _schema_of_calls(self, *others: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema of one call, of a list of calls, or of an answer of another schema."""
        schemas = [
            _schema_of(
                function if function.get("strict") else {"name": function["name"]},
                f"urn:opgraft:tool:{place}",
            )
            for place, function in enumerate(self._offered)
        ]
        call = {"$ref": "#/$defs/call"}
        return {
            "anyOf": [call, {"type": "array", "items": call, "minItems": 1}, *others],
            "$defs": {"call": {"anyOf": schemas}},
            **_SPACED,
        }

    def reader(self) -> CallReader | None:
        """Return a reader for the calls of one answer; None if the model knows of no function."""
        if self.functions is None:
            return None
        marker = PLAIN if self.forced is not None else self._marker
        return CallReader(marker, self._known, self._most)

    def plain(self, reader: CallReader | None, text: str) -> str:
        """Return the part of a text that is surely no call, of a text that the reader has read."""
        if reader is None:
            return text
        return "" if self.forced is not None else reader.plain(text)

    def calls(self, reader: CallReader | None, ended: bool) -> list[Call]:
        """Return the calls that a reader has found; one that must come comes even if it is cut at once."""
        if reader is None:
            return []
        if ended and not reader.calls and self._only is not None:
            return [Call(self._only, "")]
        return reader.calls


def _marker_of(template: str) -> str:
    """Return the beginning of a call as models of a chat template write calls."""
    if HERMES in template:
        return HERMES
    return MISTRAL if MISTRAL in template else PLAIN


def _chosen(body: ChatRequest, offered: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of the functions of which one must be called, none where that need not be."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return []
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    chosen = [
        place for place, tool in enumerate(offered) if name in (None, tool["function"]["name"])
    ]
    if not chosen:
        raise HTTPError(
            400,
            "tool_choice asks for a function that tools do not have",
            field="tool_choice",
            code="invalid_value",
        )
    return chosen


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
    if "draft-04" in str(identified.get("$schema")):
        del identified["$schema"]  # it knows no $id
    return identified


def _schema_of(function: Mapping[str, Any], identity: str) -> dict[str, Any]:
    """Return the schema of a call.

    The parameters get an identity, so that references within them go on from them and not from the whole.
    """
    parameters = _identified(function.get("parameters") or {"type": "object"}, identity)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
