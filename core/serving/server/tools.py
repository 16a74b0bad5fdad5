"""Calls of functions: what a model is told of them, and how its calls are found in its text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opgraft.engine.sampling.structured import WHITESPACE
from opgraft.errors import HTTPError
from opgraft.serving.server.protocol import ChatRequest, NamedToolChoice

_HERMES, _MISTRAL = "<tool_call>", "[TOOL_CALLS]"
"""By what a call begins in the text of models of these two schools; others write plain JSON."""

_MARKED = r"""%llguidance {{}}
start: call* TEXT
call: head SPACE %json {form}
head{lazy}: TEXT {trigger}
SPACE: /[ \n\t]{{0,16}}/
TEXT: /(.|\n)*/
"""
"""Grammar of text in which a call follows each marker."""

_PLAIN = r"""%llguidance {{}}
start: SPACE (%json {form} SPACE | TEXT)?
SPACE: /[ \n\t]{{0,16}}/
TEXT: /[^{{\[ \n\t](.|\n)*/
"""
"""Grammar of a call, or several, or else of text that does not begin as one."""


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
        functions: as the template gets them; None where the model is not to know of any.
        forced: the JSON schema of an answer that must be a call; None where it need not be one.
        forced_field: where that schema comes from.

    Raises:
        HTTPError: the template has no place for functions, or one is chosen that is not there.
    """

    def __init__(self, body: ChatRequest, template: str) -> None:
        offered = (
            []
            if body.tool_choice == "none"
            else [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        )
        if offered and "tools" not in template:
            raise HTTPError(
                400,
                "the chat template of this model has no place for tools, so it was not taught to call any: leave them "
                "out, or serve a model that was",
                field="tools",
                code="unsupported_value",
            )
        self.functions = offered or None
        chosen = _chosen(body, offered)
        self.forced = _forced([offered[place]["function"] for place in chosen])
        self.forced_field = (
            f"tools[{chosen[0]}].function.parameters" if len(chosen) == 1 else "tools"
        )
        marker = _HERMES if _HERMES in template else _MISTRAL if _MISTRAL in template else "{"
        self._marker = "" if self.forced is not None else marker
        self._most = 1 if body.parallel_tool_calls is False else None
        self._known = {tool["function"]["name"] for tool in offered}
        self._offered = [tool["function"] for tool in offered]

    def grammar(self, special: Callable[[str], int | None]) -> str | None:
        """Return the grammar of an answer of which any call is held to its schema; None where no function is strict.

        Args:
            special: the id of a special token by its text, None for a text that is none.
        """
        if self.forced is not None or not any(function.get("strict") for function in self._offered):
            return None
        schemas = [
            _schema_of(
                function if function.get("strict") else {"name": function["name"]},
                f"urn:opgraft:tool:{place}",
            )
            for place, function in enumerate(self._offered)
        ]
        call = {"$ref": "#/$defs/call"}
        form = {
            "anyOf": [call, {"type": "array", "items": call, "minItems": 1}],
            "$defs": {"call": {"anyOf": schemas}},
            "x-guidance": {"whitespace_pattern": WHITESPACE},
        }
        if self._marker == "{":
            return _PLAIN.format(form=json.dumps(form))
        token = special(self._marker)
        trigger = json.dumps(self._marker) if token is None else f"<[{token}]>"
        return _MARKED.format(
            form=json.dumps(form), lazy="[lazy]" if token is None else "", trigger=trigger
        )

    def plain(self, text: str, ended: bool) -> str:
        """Return the part of a text that is surely no call: up to the first marker, or what may become one."""
        if self.functions is None:
            return text
        if self._marker in ("", "{"):
            return text if self._marker and not _may_begin(text) else self._rest(text, ended)
        at = text.find(self._marker)
        if at >= 0:
            return text[:at].rstrip() if not ended or self.calls(text) else text
        held = 0 if ended else _overlap(text, self._marker)
        return text[: len(text) - held]

    def _rest(self, text: str, ended: bool) -> str:
        return text if ended and not self.calls(text) else ""

    def calls(self, text: str) -> list[Call]:
        """Return the calls in the whole text of an answer, none where it is not of the form."""
        if self.functions is None:
            return []
        found = list(_objects(text, self._marker))
        calls = [_call(each) for each in found]
        if any(call is None or call.name not in self._known for call in calls):
            return []
        return [call for call in calls if call is not None][: self._most]


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


def _objects(text: str, marker: str) -> Iterator[Any]:
    """Yield the JSON values after each marker; of a list, its items."""
    parts = text.split(marker)[1:] if marker in (_HERMES, _MISTRAL) else [text]
    for part in parts:
        try:
            value, _ = json.JSONDecoder().raw_decode(part.lstrip())
        except (ValueError, RecursionError):
            yield None
            continue
        yield from value if isinstance(value, list) else [value]


def _call(value: Any) -> Call | None:
    """Return a JSON value as a call, whose arguments some models name parameters."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(value["name"], arguments)
    return (
        Call(value["name"], json.dumps(arguments, ensure_ascii=False))
        if isinstance(arguments, dict)
        else None
    )
