"""``expect_quick``: refuses texts that would keep openai-harmony, and the process, busy.

The library holds the interpreter while it makes tokens. It splits a text into pieces, and the time
for a piece grows with the square of its length: a second for a piece of 40,000 letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, isqrt
from unicodedata import category

from opgraft.errors import RequestError

_CONTEXT = 1 << 17
"""Tokens of the context of gpt-oss. Each piece has at least one."""

_MOST_CHARACTERS = 16 * _CONTEXT
"""Few chats have so many characters for each token."""

_MOST_SQUARES = 1 << 26
"""Most work: the sum of the squares of long pieces, in bytes. That takes some 50 ms."""

_LONG = 64
"""Characters of a long piece. The work for shorter ones is small."""

_SLICE = 1 << 16
"""Characters whose categories are looked up at once, so that other threads run in between."""

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# A piece is made of one kind: space, letters, or signs. Signs may end with line breaks and slashes.
_RUNS = re.compile(f"(?P<space>[{_SPACE}]+)|[^{_SPACE}]+")
_LINE_ENDS = re.compile(r"[\r\n/]+")
# These search the categories of characters, each two letters. The library knows more characters
# than Python, so one without a category may be of both kinds.
_LETTERS = re.compile("(?:L.|M.|Cn)+")
_SIGNS = re.compile("(?:[MPSC].)+")
_DIGITS = re.compile("(?:N.)+")
_MOST_DIGITS = 3
"""Digits of a piece."""


@dataclass
class _Work:
    """The least work that the library has with texts.

    Attributes:
        pieces: at least so many.
        squares: of the lengths of long pieces, in bytes.
    """

    pieces: int = 0
    squares: int = 0

    @property
    def is_too_much(self) -> bool:
        return self.pieces > _CONTEXT or self.squares > _MOST_SQUARES

    def add(self, text: str) -> None:
        """Add the work for a text, until it is too much."""
        for run in _LINE_ENDS.finditer(text):
            self._add_piece(run[0])
        for run in _RUNS.finditer(text):
            start = run.start()
            if run["space"]:
                self._add_piece(run[0])
            elif run.end() - start >= _LONG:
                self._add_long_run(run[0])
            # A slash behind a line break may belong to the piece before.
            elif start and not (text[start] == "/" and text[start - 1] in "\r\n"):
                self.pieces += 1
            if self.is_too_much:
                return

    def _add_piece(self, piece: str) -> None:
        if len(piece) >= _LONG:
            self.squares += len(piece.encode(errors="surrogatepass")) ** 2

    def _add_long_run(self, run: str) -> None:
        for start in range(0, len(run), _SLICE):
            part = run[start : start + _SLICE]
            categories = "".join(map(category, part))
            for found in _SIGNS.finditer(categories):
                self._add_piece(part[found.start() // 2 : found.end() // 2])
            for found in _LETTERS.finditer(categories):
                first = found.start() // 2
                self._add_piece(part[first : found.end() // 2])
                # Letters after an apostrophe may belong to the piece before.
                self.pieces += first > 0 and part[first - 1] != "'"
            for found in _DIGITS.finditer(categories):
                digits = (found.end() - found.start()) // 2
                self.pieces += ceil(digits / _MOST_DIGITS)
            if self.is_too_much:
                return


def expect_quick(texts: Iterable[str]) -> None:
    """Check that the library can make tokens of texts at once.

    Raises:
        RequestError: the texts are longer than the context, or have too long pieces.
    """
    work = _Work()
    characters = 0
    for text in texts:
        characters += len(text)
        if characters <= _MOST_CHARACTERS:
            work.add(text)
        if characters > _MOST_CHARACTERS or work.pieces > _CONTEXT:
            raise RequestError(
                f"the chat is longer than the context of gpt-oss, which is {_CONTEXT} tokens: "
                "shorten the chat",
                code="context_length_exceeded",
            )
        if work.squares > _MOST_SQUARES:
            raise RequestError(
                "the chat has long runs of letters, signs or blanks, for which openai-harmony "
                f"would need seconds: break them up. One run may have {isqrt(_MOST_SQUARES)} bytes"
            )
