"""Answers in the format of gpt-oss: their reader, and the grammars that they follow."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from opgraft.errors import HTTPError
from opgraft.serving.harmony import (
    ANALYSIS,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    NAMESPACE,
    START,
    AnswerPart,
    HarmonyParser,
)
from opgraft.serving.outputs import CompletionOutput
from opgraft.serving.server.answer_readers import AnswerReader, ReadAnswer
from opgraft.serving.server.call_reader import WrittenCall
from opgraft.serving.server.forms import AnswerForm
from opgraft.serving.server.tools import SPACED, Tools

_GRAMMAR = rf"""%llguidance {{{{}}}}
start: thought* ({{answers}})
thought: <[{CHANNEL}]> "{ANALYSIS}" <[{MESSAGE}]> TEXT <[{END}]> <[{START}]> "assistant"
final: <[{CHANNEL}]> "final" <[{MESSAGE}]> {{final}}
call: {{calls}}
TEXT: /(.|\n)*/
"""
"""Grammar of an answer: thoughts, and then a text for the user or a call."""

_SLASH = re.compile(r"\\.|/", re.DOTALL)
"""A slash, which ends a pattern in a grammar, or a sign behind a backslash."""

_CALL = rf'<[{CHANNEL}]> {{header}} <[{CONSTRAIN}]> "json" <[{MESSAGE}]> %json {{schema}}'


class HarmonyReader(AnswerReader):
    """Reads the messages of an answer from its tokens.

    Args:
        parser: of the answer.
        tools: of the request.
        stop: strings that end the answer.
        keeps_stop: the answer ends after the stop string, not before.
    """

    def __init__(
        self, parser: HarmonyParser, tools: Tools, stop: Sequence[str], keeps_stop: bool
    ) -> None:
        self._parser = parser
        self._tools = tools
        self._keeps_stop = keeps_stop
        self._held = max(map(len, stop), default=1) - 1

    def read(self, answer: CompletionOutput) -> ReadAnswer:
        self._parser.read(answer.token_ids, answer.finished)
        thoughts, texts = [], []
        calls: list[WrittenCall] = []
        for number, part in enumerate(self._parser.parts):
            is_last = number == len(self._parser.parts) - 1
            text = self._certain(part.text, answer) if is_last else part.text
            called = _name_of(part)
            if called is not None and called in self._tools.known:
                calls.append(WrittenCall(called, text))
            elif part.channel == ANALYSIS and called is None:
                thoughts.append(text)
            else:
                texts.append(text)
        found = self._tools.calls(calls[: self._tools.most], answer.finished)
        return ReadAnswer(_joined(thoughts), _joined(texts), found)

    def _certain(self, text: str, answer: CompletionOutput) -> str:
        """Return the part of the last text that surely belongs to the answer."""
        if not answer.finished:
            # A stop string may have begun.
            return text[: max(len(text) - self._held, 0)]
        stop = answer.stop_reason
        if not isinstance(stop, str):
            return text
        return self._parser.up_to_stop(text, stop, self._keeps_stop)


def _name_of(part: AnswerPart) -> str | None:
    """Return the name of the function that a message calls, or None."""
    recipient = part.recipient or ""
    return recipient.removeprefix(NAMESPACE) if recipient.startswith(NAMESPACE) else None


def _joined(texts: Sequence[str]) -> str:
    return "\n".join(filter(None, texts))


def harmony_output(tools: Tools, form: AnswerForm | None) -> dict[str, Any] | None:
    """Return the structured output of an answer that has a form, or must or may be a call.

    The model may think before, as it is used to.

    Args:
        tools: of the request.
        form: of the text for the user; None for any text.

    Returns:
        None if any text is an answer.

    Raises:
        HTTPError: the form is a grammar, which cannot stand within another one.
    """
    if form is None and tools.forced is None and not tools.strict:
        return None
    answers = []
    if tools.forced is None:
        answers.append("final")
    if tools.functions is not None:
        answers.append("call")
    calls = [
        _CALL.format(
            header=json.dumps(f"commentary to={NAMESPACE}{name} "), schema=json.dumps(schema)
        )
        for name, schema in tools.schemas_of_arguments()
    ]
    rules = {
        "answers": " | ".join(answers),
        "final": "TEXT" if form is None or tools.forced is not None else _written(form),
        "calls": " | ".join(calls) or "TEXT",
    }
    return {"grammar": _GRAMMAR.format(**rules)}


def _written(form: AnswerForm) -> str:
    """Return a form as a part of a grammar."""
    ((kind, value),) = form.spec.items()
    if kind == "json":
        return f"%json {json.dumps({**SPACED, **value})}"
    if kind == "choice":
        return f"({' | '.join(map(json.dumps, value))})"
    if kind == "regex":
        return f"/{_SLASH.sub(_escaped, str(value))}/"
    raise HTTPError(
        400,
        f"{form.field} has a value that is not supported: the answers of this model stand in "
        "messages with headers, so give a JSON schema, a regex or a choice instead of a grammar",
        field=form.field,
        code="unsupported_value",
    )


def _escaped(found: re.Match[str]) -> str:
    return r"\/" if found[0] == "/" else found[0]
