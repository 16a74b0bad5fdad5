"""``CallReader``: finds the calls of functions in an answer while the answer grows."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from opgraft.serving.server.call_forms import PLAIN, PYTHON_TAG, CallForm

_MOST_CALLS = 128
"""Most calls of an answer. Later calls are left out."""

_LONGEST_HEAD = 1 << 12
"""Most characters of the beginning of a call. A longer one is read at the end of the answer."""

_MARK = re.compile(r'\\(?P<escaped>.)?|["{}\[\]]', re.DOTALL)
"""Characters that open or close an object, a list or a text in JSON."""

_DECODER = json.JSONDecoder()


@dataclass
class WrittenCall:
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
        form: of the calls.
        known: names of functions.
        most: the most calls. Later ones are left out.

    Attributes:
        calls: so far. The last call may still grow.
    """

    def __init__(self, form: CallForm, known: Set[str], most: int | None = None) -> None:
        self.calls: list[WrittenCall] = []
        self._form = form
        self._known = known
        self._most = _MOST_CALLS if most is None else most
        self._next = self._begin if form is PLAIN else self._find
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
            return self._before_calls(text)
        if self._ended or self._failed:
            return text
        if self._form is PLAIN:
            return "" if _may_be_plain_call(text.lstrip()) else text
        # Some models leave the opening out.
        signs = {self._form.begin, self._form.marker}
        found = [text.find(sign) for sign in signs if sign in text]
        if found:
            return text[: min(found)].rstrip()
        held = max(overlap(text, sign) for sign in signs)
        return text[: len(text) - held]

    def _before_calls(self, text: str) -> str:
        if self._form is PLAIN:
            return ""
        begun = self._begun
        if self._form.opening:
            opened = text.rfind(self._form.opening, 0, begun)
            begun = opened if opened >= 0 else begun
        return text[:begun].rstrip()

    def _find(self, text: str) -> bool:
        """Look for the next marker."""
        marker = self._form.marker
        found = text.find(marker, self._at)
        if found < 0:
            self._at = max(self._at, len(text) - len(marker) + 1)
            return False
        self._marked = found
        self._at = found + len(marker)
        self._in_list = False
        self._next = self._begin
        return True

    def _begin(self, text: str) -> bool:
        """Read the beginning of a call, or of a list of calls."""
        self._skip_space(text)
        if len(self.calls) == self._most:
            return self._fail()
        if self._form.parts is not None:
            return self._begin_arguments(text)
        if self._form is PLAIN and not self.calls and text.startswith(PYTHON_TAG, self._at):
            self._at += len(PYTHON_TAG)
            return True
        first = text[self._at : self._at + 1]
        if first == "[" and not self._in_list:
            self._in_list = True
            self._at += 1
            return True
        if first not in ("", "{"):
            is_tag_so_far = PYTHON_TAG.startswith(text[self._at :])
            return False if is_tag_so_far and not self._ended else self._fail()
        return self._begin_arguments(text)

    def _begin_arguments(self, text: str) -> bool:
        """Read the head of a call."""
        head = self._form.head.match(text, self._at, self._at + _LONGEST_HEAD)
        if head is None:
            return self._take_whole(text) if self._ended else False
        if not self._add(self._form.name_of(head), ""):
            return self._fail()
        self._at = head.start("arguments")
        self._start = self._at
        self._depth = self._form.depth
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
                if self._depth == self._form.depth and self._start >= 0:
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
        if self._form.parts is not None:
            return self._fail()
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
        if self._form is not PLAIN:
            self._next = self._find
            return True
        # Llama 3 writes semicolons between calls.
        self._skip_space(text)
        if text[self._at : self._at + 1] == ";":
            self._at += 1
            self._next = self._begin
            return True
        return self._at < len(text) and self._fail()

    def _add(self, name: object, arguments: str) -> bool:
        if not isinstance(name, str) or name not in self._known:
            return False
        if self._begun is None:
            self._begun = self._marked
        self.calls.append(WrittenCall(name, arguments))
        return True

    def _skip_space(self, text: str) -> None:
        while text[self._at : self._at + 1].isspace():
            self._at += 1

    def _fail(self) -> bool:
        """End the reading."""
        self._failed = True
        return False


def _may_be_plain_call(text: str) -> bool:
    """Return True if a text may begin a call of the form ``PLAIN``."""
    return text[:1] in ("", "{", "[") or text.startswith(PYTHON_TAG) or PYTHON_TAG.startswith(text)


def overlap(text: str, marker: str) -> int:
    """Return the number of characters at the end of a text that may begin a marker."""
    for size in range(len(marker) - 1, 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
