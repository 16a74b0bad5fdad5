"""Calls of functions: how a model learns of functions, and how a text becomes calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opgraft.engine.sampling.structured import WHITESPACE
from opgraft.errors import HTTPError
from opgraft.serving.server.protocol import ChatRequest, NamedToolChoice

_HERMES, _MISTRAL = "<tool_call>", "[TOOL_CALLS]"
"""Beginnings of a call in the text of models of these two schools; others write plain JSON."""

_INSTRUCTION = """You can call these functions, each described by a JSON schema:
{functions}
To call one, answer with {{"name": its name, "arguments": an object with its arguments}} and nothing else."""
"""Text of a system message about functions, for templates without a place for tools."""

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

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")'
    r'(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<arguments>.*))?',
    re.DOTALL,
)
"""Beginning of a call: a name, and arguments, or parameters as some models write."""

_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Call:
    """A call of a function, its arguments as JSON."""

    name: str
    arguments: str

    def as_dict(self, call_id: str) -> dict[str, Any]:
        """Return the call as OpenAI has it."""
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class Tools:
    """The functions of a request, and the form in which its model calls them.

    Args:
        body: of the request.
        template: of the model's chats, as source.

    Attributes:
        functions: as the template gets them; None if the model is not to know of any.
        instruction: tells the model of the functions if the template has no place for them.
        forced: the JSON schema of an answer that must be a call; None if it need not be one.
        forced_field: where that schema comes from.

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

        self._offered = functions
        self._known = {function["name"] for function in functions}
        self._most = 1 if body.parallel_tool_calls is False else None
        self._marker = ""
        if self.forced is None:
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
        strict = any(function.get("strict") for function in self._offered)
        if not self._offered or not (strict or form is not None):
            return None
        if self._marker == "{" and form is not None:
            return {"json": self._schema_of_calls({"$id": "urn:opgraft:form", **form})}
        parts = {"call": json.dumps(self._schema_of_calls()), "form": json.dumps(form)}
        if self._marker == "{":
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
            "x-guidance": {"whitespace_pattern": WHITESPACE},
        }

    def plain(self, text: str, ended: bool) -> str:
        """Return the part of a text that is surely no call: up to the first marker, or what may become one."""
        if self.functions is None:
            return text
        if self.forced is not None:
            return ""
        if self._marker == "{":
            return text if not _may_begin(text) or (ended and not self.calls(text)) else ""
        at = text.find(self._marker)
        if at >= 0:
            return text if ended and not self.calls(text) else text[:at].rstrip()
        held = 0 if ended else _overlap(text, self._marker)
        return text[: len(text) - held]

    def calls(self, text: str) -> list[Call]:
        """Return the calls in an answer so far, the last one perhaps cut.

        Other text, or a call of an unknown function, ends the list.
        """
        if self.functions is None:
            return []
        pieces = text.split(self._marker)[1:] if self._marker in (_HERMES, _MISTRAL) else [text]
        found: list[Call] = []
        for piece in pieces:
            calls, whole = self._calls_in(piece)
            found += calls
            if not whole:
                break
        if not found and self._only is not None:
            found = [Call(self._only, "")]  # cut within the name
        return found[: self._most]

    def _calls_in(self, text: str) -> tuple[list[Call], bool]:
        """Return the calls at the beginning of a text, one or a list, and True if nothing was amiss."""
        text = text.lstrip()
        several = text.startswith("[")
        rest = text[1:] if several else text
        found: list[Call] = []
        while True:
            call, rest = _first_call(rest)
            if call is None or call.name not in self._known:
                return found, False
            found.append(call)
            rest = rest.lstrip()
            if not several or not rest.startswith(","):
                return found, True
            rest = rest[1:]


def _marker_of(template: str) -> str:
    """Return the beginning of a call as models of a chat template write calls."""
    if _HERMES in template:
        return _HERMES
    return _MISTRAL if _MISTRAL in template else "{"


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


def _schema_of(function: Mapping[str, Any], identity: str) -> dict[str, Any]:
    """Return the schema of a call.

    The parameters get an identity, so that references within them go on from them and not from the whole.
    """
    parameters = {"$id": identity, **(function.get("parameters") or {"type": "object"})}
    if "draft-04" in str(parameters.get("$schema")):
        del parameters["$schema"]  # it knows no $id
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _may_begin(text: str) -> bool:
    """Tell whether a text may be JSON from its beginning, as far as it goes."""
    return text.lstrip()[:1] in ("", "{", "[")


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of a text begin a marker."""
    return next((size for size in range(len(marker) - 1, 0, -1) if text.endswith(marker[:size])), 0)


def _first_call(text: str) -> tuple[Call | None, str]:
    """Return the call that a text begins with, perhaps cut, and the text behind the call."""
    try:
        value, end = _DECODER.raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return _cut_call(text), ""
    rest = text.lstrip()[end:]
    if not isinstance(value, dict):
        return None, rest
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        return None, rest
    if isinstance(arguments, str):
        return Call(name, arguments), rest
    written = json.dumps(arguments, ensure_ascii=False)
    cut = _cut_call(text)
    # In the words of the model, if a stream could bring them.
    if cut is not None and cut.arguments:
        written = cut.arguments
    return Call(name, written), rest


def _cut_call(text: str) -> Call | None:
    """Return a call that begins with a name, with the arguments so far."""
    head = _HEAD.match(text)
    if head is None:
        return None
    arguments = head["arguments"] or ""
    if not arguments.startswith("{"):  # JSON within a text is told once it is whole
        arguments = ""
    try:
        _, end = _DECODER.raw_decode(arguments)
    except (ValueError, RecursionError):
        end = len(arguments)
    return Call(json.loads(head["name"]), arguments[:end])
