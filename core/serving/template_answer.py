"""The form of an answer of the process that renders chat templates, for both ends of its pipe.

An answer is one byte, the kind; the length of a text, in ``LENGTH_BYTES``; and the text in UTF-8.
"""

from __future__ import annotations

import enum

READY = b"\n"
"""The first byte that the process writes."""

LENGTH_BYTES = 8

MOST_CHARACTERS = 1 << 24
"""Longest text of a chat: about three million tokens."""


class AnswerKind(enum.Enum):
    """The kinds of an answer, each with its first byte."""

    TEXT = b"T"
    """The text of the chat."""
    REFUSED = b"R"
    """The reason why the template makes no text of the chat."""
    INVALID = b"I"
    """The line of a fault in the source of the template, and the reason."""
    EXHAUSTED = b"E"
    """The process has reached its limit of memory, and ends."""
