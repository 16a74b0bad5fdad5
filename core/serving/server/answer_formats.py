"""``AnswerFormat``: how the answers of a family of models are read, and held to a form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from opgraft.engine.sampling_params import SamplingParams
from opgraft.serving.chat_format import ChatFormat
from opgraft.serving.harmony import HarmonyFormat
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.server.answer_readers import AnswerReader, TextReader
from opgraft.serving.server.forms import AnswerForm
from opgraft.serving.server.harmony_answers import HarmonyReader, harmony_output
from opgraft.serving.server.reasoning import ReasoningReader, opening_of_template
from opgraft.serving.server.tools import Tools


@dataclass(frozen=True)
class WantedAnswer:
    """The answer that a chat asks for.

    Attributes:
        tools: that the answer may call.
        form: of the text for the user; None for any text.
        template: the source of the chat template, or a text with the markers of a library.
        special: returns the id of a special token for the text of the token, or None.
    """

    tools: Tools
    form: AnswerForm | None
    template: str
    special: Callable[[str], int | None]


class AnswerFormat(ABC):
    """The way in which a family of models writes a wanted answer.

    Args:
        wanted: the answer.
    """

    def __init__(self, wanted: WantedAnswer) -> None:
        self.wanted = wanted

    @property
    def shows_special_tokens(self) -> bool:
        """True if the text of an answer needs its special tokens, so that calls are found."""
        return self.wanted.tools.functions is not None

    @abstractmethod
    def structured_output(self) -> dict[str, Any] | None:
        """Return the structured output of an answer that has a form, or must or may be a call.

        Returns:
            None if any text is an answer.

        Raises:
            HTTPError: this family cannot write the form.
        """

    @abstractmethod
    def reader(self, output: RequestOutput, prompt: str, params: SamplingParams) -> AnswerReader:
        """Return a reader of one answer.

        Args:
            output: with the token ids of the prompt.
            prompt: the text of the prompt; empty if a library has made the token ids.
            params: of the request.
        """


class TextAnswers(AnswerFormat):
    """Answers that are text with the markers of a chat template."""

    def __init__(self, wanted: WantedAnswer) -> None:
        super().__init__(wanted)
        # An answer of a form has no place for reasoning.
        is_free = wanted.form is None and wanted.tools.forced is None
        self._opening = opening_of_template(wanted.template) if is_free else None

    @property
    def shows_special_tokens(self) -> bool:
        if self._opening is not None and self.wanted.special(self._opening) is not None:
            return True
        return super().shows_special_tokens

    def structured_output(self) -> dict[str, Any] | None:
        form = self.wanted.form
        schema = None if form is None else form.spec.get("json")
        held = self.wanted.tools.structured_output(self.wanted.special, schema)
        if held is not None or form is None:
            return held
        return form.spec

    def reader(self, output: RequestOutput, prompt: str, params: SamplingParams) -> AnswerReader:
        if self._opening is None:
            return TextReader(self.wanted.tools, None)
        opened = prompt.rstrip().endswith(self._opening)
        return TextReader(self.wanted.tools, ReasoningReader(opened, self._opening))


class HarmonyAnswers(AnswerFormat):
    """Answers of gpt-oss: messages with channels, which a library reads from the token ids.

    Args:
        written: the format of the chat.
        wanted: the answer.
    """

    def __init__(self, written: HarmonyFormat, wanted: WantedAnswer) -> None:
        super().__init__(wanted)
        self._written = written

    def structured_output(self) -> dict[str, Any] | None:
        return harmony_output(self.wanted.tools, self.wanted.form)

    def reader(self, output: RequestOutput, prompt: str, params: SamplingParams) -> AnswerReader:
        parser = self._written.parser(output.prompt_token_ids)
        keeps_stop = params.include_stop_str_in_output
        return HarmonyReader(parser, self.wanted.tools, params.stop, keeps_stop)


@singledispatch
def answer_format(written: ChatFormat, wanted: WantedAnswer) -> AnswerFormat:
    """Return the format of answers to chats of a format. Further formats register here."""
    return TextAnswers(wanted)


@answer_format.register
def _(written: HarmonyFormat, wanted: WantedAnswer) -> AnswerFormat:
    return HarmonyAnswers(written, wanted)
