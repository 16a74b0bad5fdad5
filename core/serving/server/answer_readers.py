"""Readers of growing answers: reasoning, text and calls, by the form in which a model answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from opgraft.serving.outputs import CompletionOutput
from opgraft.serving.server.call_reader import WrittenCall
from opgraft.serving.server.reasoning import ReasoningReader
from opgraft.serving.server.tools import Tools


class ReadAnswer(NamedTuple):
    """The parts of an answer so far. Each part only grows.

    Attributes:
        reasoning: of the model.
        text: for the user.
        calls: of functions. The last one may still grow.
    """

    reasoning: str
    text: str
    calls: Sequence[WrittenCall]


class AnswerReader(ABC):
    """Reads one growing answer. Nothing that was told is taken back."""

    @abstractmethod
    def read(self, answer: CompletionOutput) -> ReadAnswer:
        """Return the parts of an answer so far."""


class TextReader(AnswerReader):
    """Reads the text of an answer, with the markers of a chat template.

    Args:
        tools: of the request.
        reasoning: reads reasoning; None if the answer has none.
    """

    def __init__(self, tools: Tools, reasoning: ReasoningReader | None) -> None:
        self._tools = tools
        self._calls = tools.reader()
        self._reasoning = reasoning

    def read(self, answer: CompletionOutput) -> ReadAnswer:
        reasoned, text = "", answer.text
        if self._reasoning is not None:
            reasoned, text = self._reasoning.split(text, answer.finished)
        found: Sequence[WrittenCall] = ()
        if self._calls is not None:
            self._calls.read(text, answer.finished)
            found = self._calls.calls
        calls = self._tools.calls(found, answer.finished)
        return ReadAnswer(reasoned, self._tools.plain(self._calls, text), calls)
