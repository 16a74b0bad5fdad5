"""``CallReader``: finds the calls of functions in an answer while the answer grows."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

HERMES = "<tool_call>"
MISTRAL = "[TOOL_CALLS]"
"""Beginnings of a call in texts of models of these two schools. Others write plain JSON."""

PLAIN = "{"
"""No beginning: the whole text is a call, or a list of calls."""

_MOST_CALLS = 128
"""Most calls of an answer. Later calls are left out."""

_LONGEST_HEAD = 1 << 12
"""Most characters of the beginning of a call. A longer one is read at the end of the answer."""

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<arguments>\{)',
    re.DOTALL,
)
"""Beginning of a call up to the arguments, or parameters as some models write."""

_MARK = re.compile(r'\\(?P<escaped>.)?|["{}\[\]]', re.DOTALL)
"""Characters that open or close an object, a list or a text in JSON."""

_DECODER = json.JSONDecoder()


@dataclass
class Call:
    """A call of a function, with arguments as JSON, perhaps cut."""

    name: str
    arguments: str

    def as_dict(self, call_id: str) -> dict[str, Any]:
        """Return the call in OpenAI's form."""
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class CallReader:
    """Reads the calls of one answer. Each character of the arguments is read once.

    A call counts when the arguments begin, so that a stream can show growing arguments. Text of
    another form ends the reading: neither the text nor the rest of the answer is a call.

    Args:
        marker: ``HERMES`` or ``MISTRAL`` before each call, or ``PLAIN``.
        known: names of functions.
        most: the most calls. Later ones are left out.

    Attributes:
        calls: so far. The last call may still grow.
    """

    def __init__(self, marker: str, known: Set[str], most: int | None = None) -> None:
        self.calls: list[Call] = []
        self._marker = marker
        self._known = known
        self._most = _MOST_CALLS if most is None else most
        self._next = self._find if marker != PLAIN else self._begin
        self._failed = False
        # Places of the first marker with a call, and of the latest marker.
        self._begun: int | None = None
        self._marked = 0
        self._at = 0
        self._in_list = False
        # Of the arguments of an open call; -1 after their end.
        self._start = 0
        self._depth = 0
        self._in_text = False
        self._ended = False

    def read(self, text: str, ended: bool) -> None:
        """Read on.

        Args:
            text: of the answer so far.
            ended: the text is whole.
        """
        self._ended = ended
        while not self._failed and self._next(text):
            pass

    def plain(self, text: str) -> str:
        """Return the part of a read text that is surely no call."""
        if self.calls:
            return "" if self._marker == PLAIN else text[: self._begun].rstrip()
        if self._ended or self._failed:
            return text
        if self._marker == PLAIN:
            return text if text.lstrip()[:1] not in ("", "{", "[") else ""
        found = text.find(self._marker)
        if found >= 0:
            return text[:found].rstrip()
        return text[: len(text) - _overlap(text, self._marker)]

    def _find(self, text: str) -> bool:
        """Look for the next marker."""
        found = text.find(self._marker, self._at)
        if found < 0:
            self._at = max(self._at, len(text) - len(self._marker) + 1)
            return False
        self._marked = found
        self._at = found + len(self._marker)
        self._in_list = False
        self._next = self._begin
        return True

    def _begin(self, text: str) -> bool:
        """Read the beginning of a call, or of a list of calls."""
        self._skip_space(text)
        first = text[self._at : self._at + 1]
        if first == "[" and not self._in_list:
            self._in_list = True
            self._at += 1
            return True
        if first not in ("", "{") or len(self.calls) == self._most:
            return self._fail()
        head = _HEAD.match(text, self._at, self._at + _LONGEST_HEAD)
        if head is None:
            return self._take_whole(text) if self._ended else False
        if not self._add(_decoded(head["name"]), ""):
            return self._fail()
        self._at = head.start("arguments")
        self._start = self._at
        # The object of the call is open.
        self._depth = 1
        self._in_text = False
        self._next = self._read_arguments
        return True

    def _read_arguments(self, text: str) -> bool:
        """Read the arguments of an open call, and the rest of the call."""
        for mark in _MARK.finditer(text, self._at):
            # The escaped character has not come yet.
            if mark[0] == "\\":
                self._at = mark.start()
                break
            self._at = mark.end()
            if mark[0] == '"':
                self._in_text = not self._in_text
            elif not self._in_text and mark[0] in "{[":
                self._depth += 1
            elif not self._in_text and mark[0] in "}]":
                self._depth -= 1
                if self._depth == 1 and self._start >= 0:
                    self.calls[-1].arguments = text[self._start : self._at]
                    self._start = -1
                if self._depth == 0:
                    self._next = self._go_on
                    return True
        else:
            self._at = len(text)
        if self._start >= 0:
            self.calls[-1].arguments = text[self._start :]
        return False

    def _take_whole(self, text: str) -> bool:
        """Read a call in another order, or with arguments as text, after the end of the answer."""
        try:
            value, end = _DECODER.raw_decode(text, self._at)
        except (ValueError, RecursionError):
            return self._fail()
        given = value if isinstance(value, dict) else {}
        arguments = given.get("arguments", given.get("parameters", {}))
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str) or not self._add(given.get("name"), arguments):
            return self._fail()
        self._at = end
        self._next = self._go_on
        return True

    def _go_on(self, text: str) -> bool:
        """Read on behind a call: to the next call of a list, or the next marker."""
        if self._in_list:
            self._skip_space(text)
            following = text[self._at : self._at + 1]
            if not following:
                return False
            if following == ",":
                self._at += 1
                self._next = self._begin
                return True
        if self._marker == PLAIN:
            return self._fail()
        self._next = self._find
        return True

    def _add(self, name: object, arguments: str) -> bool:
        if not isinstance(name, str) or name not in self._known:
            return False
        if self._begun is None:
            self._begun = self._marked
        self.calls.append(Call(name, arguments))
        return True

    def _skip_space(self, text: str) -> None:
        while text[self._at : self._at + 1].isspace():
            self._at += 1

    def _fail(self) -> bool:
        """End the reading."""
        self._failed = True
        return False


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _overlap(text: str, marker: str) -> int:
    """Return the number of characters at the end of a text that may begin a marker."""
    for size in range(len(marker) - 1, 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
