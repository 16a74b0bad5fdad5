"""The forms in which families of models write calls of functions: one row for each form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

_AN_OBJECT = re.compile(
    r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<arguments>\{)',
    re.DOTALL,
)
"""Beginning of ``{"name": "f", "arguments": {}}``, or with ``parameters`` as some models write."""

_NAME = "NAME"
_ARGUMENTS = "ARGUMENTS"
"""Stand in ``parts`` for the name of a function and for its arguments."""


@dataclass(frozen=True)
class CallForm:
    """The form of calls.

    Attributes:
        family: the models that write so.
        signs: texts that a chat template of the family has.
        marker: the text before each call. Empty: the whole answer is a call, or a list of calls.
        opening: the text before the marker of the first call, if it differs from the marker.
        head: the text behind a marker, up to the arguments.
        parts: the texts of a call around its name and arguments. None: a call is a JSON object
            with the name and the arguments, or a list of such objects.
        closing: the text behind the last call.
    """

    family: str
    signs: tuple[str, ...]
    marker: str
    opening: str = ""
    head: re.Pattern[str] = _AN_OBJECT
    parts: tuple[str, ...] | None = None
    closing: str = ""

    @property
    def begin(self) -> str:
        """The text with which the calls of an answer begin."""
        return self.opening or self.marker

    @property
    def depth(self) -> int:
        """The number of open JSON objects before the arguments."""
        return 1 if self.parts is None else 0

    def name_of(self, head: re.Match[str]) -> object:
        """Return the name of the function in a head, or None if the name cannot be read."""
        if self.parts is not None:
            return head["name"]
        try:
            return json.loads(head["name"])
        except ValueError:
            return None

    def rule(self, name: str, arguments: str, token: Callable[[str], int | None]) -> str:
        """Return the part of a grammar for one call, behind the marker.

        Args:
            name: of the function.
            arguments: the JSON schema of the arguments, as text.
            token: returns the id of a special token for its text, or None.
        """
        written = []
        for part in self.parts or ():
            if part == _NAME:
                written.append(json.dumps(name))
            elif part == _ARGUMENTS:
                written.append(f"%json {arguments}")
            else:
                written.append(literal(part, token))
        return " ".join(written)


def literal(text: str, token: Callable[[str], int | None]) -> str:
    """Return a text for a grammar: a special token by its id, other text in quotes."""
    if not text:
        return ""
    found = token(text)
    return json.dumps(text) if found is None else f"<[{found}]>"


_DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_SEP = "<｜tool▁sep｜>"
_DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_END = "<｜tool▁calls▁end｜>"

PLAIN = CallForm("Llama 3, and others", (), "")
"""The form of models whose template has no sign of another one."""

PYTHON_TAG = "<|python_tag|>"
"""A token that Llama 3 writes before some calls."""

FORMS = (
    CallForm(
        "DeepSeek V3 and R1",
        (_DEEPSEEK_CALL, "```json"),
        _DEEPSEEK_CALL,
        opening=_DEEPSEEK_BEGIN,
        head=re.compile(r"function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n(?P<arguments>\{)"),
        parts=(
            *("function", _DEEPSEEK_SEP, _NAME, "\n```json\n", _ARGUMENTS, "\n```"),
            _DEEPSEEK_CALL_END,
        ),
        closing=_DEEPSEEK_END,
    ),
    CallForm(
        "DeepSeek V3.1",
        (_DEEPSEEK_CALL,),
        _DEEPSEEK_CALL,
        opening=_DEEPSEEK_BEGIN,
        head=re.compile(r"(?P<name>[^\n<]+)<｜tool▁sep｜>(?P<arguments>\{)"),
        parts=(_NAME, _DEEPSEEK_SEP, _ARGUMENTS, _DEEPSEEK_CALL_END),
        closing=_DEEPSEEK_END,
    ),
    CallForm("Granite 3", ("<|tool_call|>",), "<|tool_call|>"),
    CallForm("Hermes, Qwen, Granite 3.2 and 4, SmolLM3", ("<tool_call>",), "<tool_call>"),
    CallForm(
        "Mistral since November 2024",
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]",
        head=re.compile(
            r"(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\]\s*(?P<arguments>\{)"
        ),
        parts=(_NAME, "[ARGS]", _ARGUMENTS),
    ),
    CallForm("Mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]"),
    PLAIN,
)
"""The first row counts whose signs a chat template has."""


def form_of_template(template: str) -> CallForm:
    """Return the form of calls by the models of a chat template."""
    return next(form for form in FORMS if all(sign in template for sign in form.signs))
